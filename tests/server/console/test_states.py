"""The console's states at each width, in light and dark: nothing is clipped, and all users can use it.

`CONSOLE_STATES=folder` saves a screenshot of each state there.
"""

import os
import re
import shutil
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.server.conftest import index_in, on_a_port
from tests.server.console.pages import check_access, drawn, fits, search, status
from tiered_index import IndexReader

pytestmark = pytest.mark.long

WIDTHS = (390, 800, 1400)
# finds clipped parts: an element that is narrower than its contents
CLIPPED = """[...document.querySelectorAll("main *")].filter((one) => one.checkVisibility() && one.clientWidth > 1
  && one.scrollWidth > one.clientWidth + 1 && getComputedStyle(one).overflowX !== "visible"
  && !one.matches("pre, input, .skip, .u-over")).map((one) => one.outerHTML.slice(0, 120))"""
# the number of rows of the head's parts
HEAD_ROWS = """new Set([...document.querySelectorAll("header h1, nav a, #ready, #sign-out")]
  .filter((one) => one.offsetParent && one.getBoundingClientRect().left >= 0)
  .map((one) => Math.round((one.getBoundingClientRect().top + one.getBoundingClientRect().bottom) / 16))).size"""


@pytest.fixture
def folder():
    return Path(os.environ["CONSOLE_STATES"]) if "CONSOLE_STATES" in os.environ else None


def look(page, folder, name, widths=WIDTHS):
    """Check the page in each width and shade; with `CONSOLE_STATES`, save a screenshot of each."""
    for width in widths:
        page.set_viewport_size({"width": width, "height": 900})
        for shade in ("light", "dark"):
            page.emulate_media(color_scheme=shade)
            if folder:
                page.screenshot(path=folder / f"{name}-{width}-{shade}.png", full_page=True)
            check_access(page)
        assert fits(page), (name, width)
        assert page.evaluate(CLIPPED) == [], (name, width)
        assert page.evaluate(HEAD_ROWS) == 1, (name, width)


def test_empty(opened, folder, tmp_path):
    with index_in(tmp_path) as index, on_a_port(index) as client:
        page = opened(str(client.base_url), "#search?topic=orders&key=customer-7")
        expect(page.locator("#said")).to_contain_text("The index has no entries yet.")
        look(page, folder, "empty-search")
        page.get_by_role("link", name="Files").click()
        expect(page.get_by_text("The index has no files yet.")).to_be_visible()
        look(page, folder, "empty-files", WIDTHS[:1])


def test_partial(opened, folder, indexed, tmp_path):
    copied = tmp_path / "storage"
    shutil.copytree(indexed.storage, copied)
    gone = sorted(copied.rglob("*.index"))[2]
    gone.unlink()
    with IndexReader.open(copied.as_uri()) as reader, on_a_port(reader, store=indexed.store) as client:
        page = opened(str(client.base_url), "#search?topic=orders&key=customer-7")
        alert = page.get_by_role("alert").filter(has_text="(502)")
        expect(alert).to_contain_text(gone.parent.name.removesuffix("%"))
        expect(alert).to_contain_text("tiered-index verify")
        expect(status(page)).to_have_text("The search failed.")
        page.get_by_role("button", name="Show what can be read").click()
        expect(status(page)).to_have_text(re.compile(r"^\d+ entries, and some may be missing\.$"))
        missing = page.locator("#missing")
        expect(missing).to_contain_text("Missing: files that could not be read")
        expect(missing.locator("li").last).to_contain_text(gone.parent.name.removesuffix("%"))
        assert drawn(page, "#explain-chart", "--failed")
        expect(missing).to_contain_text("2025-11-01 02:00:00Z to 2025-11-01 02:30:00Z")
        look(page, folder, "partial-search")
        # beside the list, if there is room
        boxes = [page.locator(selector).bounding_box() for selector in ("#entries", "#missing")]
        assert boxes[1]["x"] >= boxes[0]["x"] + boxes[0]["width"] and abs(boxes[1]["y"] - boxes[0]["y"]) < 40
        search(page, "orders", "order-7")
        expect(missing).to_be_empty()


def test_ten_thousand_files(opened, folder, service, ten_thousand_files):
    page = opened(service, "#files")
    expect(page.locator("#files-sums")).to_contain_text("10,000 files (2,500 compacted, 2,500 uploaded, 5,000 storage)")
    table = page.locator("#files-table")
    expect(table.locator("tbody tr")).to_have_count(25)
    assert drawn(page, "#files-chart", "--storage")
    look(page, folder, "10000-files")
    table.get_by_role("button", name="From").click()
    table.get_by_role("button", name="From").click()
    expect(table.locator("tbody tr").first).to_contain_text(ten_thousand_files[-1].file_id)
    table.get_by_role("button", name="Next").click()
    expect(table).to_contain_text("26 to 50 of 10,000")
    # the figures stay those of the time before the service was lost
    pause = page.get_by_role("button", name="Pause")
    pause.click()
    page.context.set_offline(True)
    pause.click()
    expect(page.locator("#files-said")).to_contain_text("The table is from 20")
    page.get_by_role("link", name="Health").click()
    expect(page.locator("#reasons")).to_contain_text("This page keeps trying.")
    page.context.set_offline(False)
    page.get_by_role("link", name="Search").click()
    search(page)
    expect(page.locator("#said")).to_contain_text("The search read or skipped 10,000 files")
    page.get_by_text("The files as a table").click()
    expect(page.locator("#explain-table tbody tr")).to_have_count(25)
    assert page.locator("tr").count() < 150
    look(page, folder, "10000-files-search", WIDTHS[:1])
