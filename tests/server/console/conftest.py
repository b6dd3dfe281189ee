"""An index with files in several states, a service beside it, and a browser that opens the console's pages."""

import os
import shutil
from types import SimpleNamespace

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.server.conftest import index_in, instead_of_query, on_a_port
from tests.server.console.pages import BEGIN_MS, HOUR_MS, put_messages, settled_in_hours
from tiered_index import IndexService
from tiered_index.types import Explain, FileReport, QueryResult

expect.set_options(timeout=30_000)


@pytest.fixture(scope="package")
def indexed(tmp_path_factory):
    """An index with files in several states, and the store of its messages."""
    folder = tmp_path_factory.mktemp("console")
    put_messages(folder / "store")
    with index_in(folder, local_keep_s=0, items=2000) as index:
        settled_in_hours(index, folder / "store")
        yield SimpleNamespace(index=index, store=folder / "store", storage=folder / "storage")


@pytest.fixture(scope="package")
def service(indexed):
    """A service beside the writer."""
    with on_a_port(indexed.index, store=indexed.store) as client:
        yield str(client.base_url)


# not longer: while Playwright runs, no other test of this process can run an event loop
@pytest.fixture(scope="package")
def browser():
    """Chromium without a window."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert program, "the console's tests need Chromium: bash deploy/find-chromium.sh installs it"
    args = ["--disable-lcd-text", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=program, args=args)
        yield launched
        launched.close()


@pytest.fixture
def opened(browser):
    """Open pages at an address. The test fails on errors of a page and on violations of its policy."""
    contexts, wrong = [], []

    def open_page(url: str, at: str = "", **more) -> Page:
        contexts.append(browser.new_context(**{"viewport": {"width": 1180, "height": 800}, **more}))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on(
            "console",
            lambda said: said.type == "error" and "Failed to load" not in said.text and wrong.append(said.text),
        )
        page.goto(f"{url}/console/{at}")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert wrong == []


@pytest.fixture
def ten_thousand_files(monkeypatch):
    """10,000 files in several states, an hour each. Lookups read or skip them."""
    lanes = ["unsealed", "compacted", "uploaded", "storage"]
    files = [
        SimpleNamespace(
            file_id=f"{BEGIN_MS + n * HOUR_MS:015d}-{n:012x}",
            place=lanes[n % 4] if n % 4 else "storage",
            lane="main",
            sequence=n,
            second_min=BEGIN_MS // 1000 + n * 3600,
            second_max=BEGIN_MS // 1000 + n * 3600 + 3599,
        )
        for n in range(10_000)
    ]
    reports = tuple(
        FileReport(
            file=file.file_id,
            place="storage",
            outcome=("read", "skipped_filter", "skipped_time")[file.sequence % 3],
            begin_ms=file.second_min * 1000,
            end_ms=file.second_max * 1000,
            requests=file.sequence % 3 == 0,
        )
        for file in files
    )
    monkeypatch.setattr(IndexService, "files", lambda self: files)
    answer = QueryResult(items=(), status="complete", explain=Explain(files=reports, requests=3334))
    instead_of_query(monkeypatch, lambda *_, **__: answer)
    return files
