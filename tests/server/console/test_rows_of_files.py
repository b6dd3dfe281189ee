"""The console shows rows of files with their file and place, without the words of brokers."""

import json

import pytest
from playwright.sync_api import expect

from tests.integration.cli.command_lines import run_here
from tests.server.conftest import on_a_port
from tests.server.console.pages import check_access, rows
from tiered_index import IndexReader

pytestmark = pytest.mark.long


def test_rows_of_files_are_listed_and_opened(opened, tmp_path):
    log = tmp_path / "app.ndjson"
    log.write_text("".join(f"{json.dumps({'order_id': n % 3, 'at': 1_700_000_000 + n, 'n': n})}\n" for n in range(30)))
    storage = f"file://{tmp_path}/objects"
    keys = ("--topic", "orders", "--key", "order_id", "--time", "at", "--wait")
    done = run_here("ingest", log, *keys, "--root", tmp_path / "root", "--storage", storage)
    assert done.code == 0, done.err
    with IndexReader.open(storage) as reader, on_a_port(reader) as client:
        page = opened(str(client.base_url), "#search?topic=orders&key=1")
        expect(rows(page)).to_have_count(10)
        expect(rows(page).first).to_contain_text('"n": 28')
        titles = page.locator("#entries-table thead th").all_inner_texts()
        assert {"File", "Row"} <= {*titles} and {"Queue", "Offset", "Size"}.isdisjoint(titles)
        check_access(page)
        page.locator("summary", has_text="As a command").first.click()
        expect(page.locator("#commands")).not_to_contain_text("mqadmin")
        rows(page).first.get_by_role("button").click()
        message = page.locator("#message")
        expect(message).to_contain_text("read from its file")
        expect(message).to_contain_text(log.as_uri())
        expect(message.locator("pre")).to_contain_text('"n": 28')
        expect(message).not_to_contain_text("queue")
        log.write_text(log.read_text().replace('"n": 28', '"n": 29'))
        page.reload()
        expect(message).to_contain_text("has changed since it was indexed")
