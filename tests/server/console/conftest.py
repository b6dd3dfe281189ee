"""An index with files in several states, a service beside it, and a browser that opens the console's pages."""

from __future__ import annotations

import os
import shutil
from types import SimpleNamespace

import pytest
from playwright.sync_api import Page, expect, sync_playwright

from tests.server.conftest import serving
from tests.server.console.pages import put_messages, settled_in_hours
from tiered_index import IndexService

expect.set_options(timeout=30_000)


@pytest.fixture(scope="package")
def made(tmp_path_factory):
    """An index with files in several states, and the store of its messages."""
    folder = tmp_path_factory.mktemp("console")
    put_messages(folder / "store")
    uri = (folder / "storage").as_uri()
    kept = {"local_keep_s": 0, "slots": 100, "items": 2000, "background": False}
    with IndexService.open(root=folder / "root", storage=uri, **kept) as index:
        settled_in_hours(index, folder / "store")
        yield SimpleNamespace(index=index, store=folder / "store", storage=folder / "storage")


@pytest.fixture(scope="package")
def service(made):
    """A service beside the writer."""
    with serving(made.index, store=made.store) as client:
        yield str(client.base_url)


# not longer: while Playwright runs, no other test of this process can run an event loop
@pytest.fixture(scope="package")
def browser():
    """Chromium without a window."""
    program = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert program, "the console's tests need Chromium: bash deploy/find-chromium.sh installs it"
    args = ["--disable-lcd-text", *(["--no-sandbox"] if os.geteuid() == 0 else [])]
    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=program, args=args)
        yield found
        found.close()


@pytest.fixture
def opened(browser):
    """Open pages at an address; what a page or its policy complains of fails the test."""
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
