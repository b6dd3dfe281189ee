"""The console's views in a browser: permissions, any number of files, and any width.

`CONSOLE_IMAGES=docs/images` makes the pictures of docs/service.md again.
"""

import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.server.conftest import on_a_port
from tests.server.console.pages import check_access, rows, search, status
from tiered_index import IndexReader
from tiered_index.server.http.tokens import add_token

pytestmark = pytest.mark.long


def test_a_token_is_asked_for_refused_and_kept_by_the_tab(opened, indexed, tmp_path):
    path = tmp_path / "tokens.json"
    some = add_token(path, "some", "read", ["pay"])
    with on_a_port(indexed.index, tokens=path, store=indexed.store) as client:
        page = opened(str(client.base_url), "#search?topic=payments&key=payment-1")
        field = page.get_by_label("Token", exact=True)
        expect(field).to_be_focused()
        check_access(page)
        for wrong in ("ti_wrong", "ti wrong", "ti_\u00fc", f"{some}\N{EM DASH}"):
            field.fill(wrong)
            page.keyboard.press("Enter")
            expect(page.get_by_role("alert").filter(has_text="does not know this token")).to_be_visible()
            expect(page.locator("#search-view")).to_be_hidden()
            assert page.evaluate("sessionStorage.length") == 0, wrong
            page.reload()
            expect(field).to_be_focused()
        field.fill(some)
        page.keyboard.press("Enter")
        # the view repeats the same lookup
        expect(status(page)).to_have_text("1 entry: the answer is complete.")
        expect(page.locator("#explain-sums")).to_contain_text("This token covers some topics only")
        expect(page.locator("#explain-chart")).to_be_hidden()
        expect(page.locator("#explain summary")).to_be_hidden()
        page.reload()
        expect(status(page)).to_have_text("1 entry: the answer is complete.")
        assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 1, ""]
        assert some not in page.url
        search(page, "orders", "customer-7")
        expect(page.get_by_role("alert").filter(has_text="(403)")).to_contain_text(
            "the token is not for topic 'orders'"
        )
        page.get_by_role("link", name="Cost").click()
        expect(page.locator("#cost-table tbody tr")).to_have_count(1)
        expect(page.locator("#cost-table tbody")).to_contain_text("payments")
        expect(page.locator("#cost-sums")).to_have_text(re.compile(r"^8 entries, .*; objects in the storage cost"))
        # the page has no link to a refused view, and no address of it
        for view in ("Files", "Health"):
            expect(page.get_by_role("link", name=view)).to_have_count(0)
        page.evaluate("location.hash = '#health'")
        expect(page.get_by_role("heading", name="Which messages carry this key?")).to_be_visible()
        page.get_by_role("button", name="Sign out").click()
        expect(field).to_be_visible()
        assert page.evaluate("sessionStorage.length") == 0
        # a link with the token opens its view, and drops the token at once
        page = opened(str(client.base_url), f"#token={some}&search?topic=payments&key=payment-2")
        expect(status(page)).to_have_text("1 entry: the answer is complete.")
        assert page.url.endswith("/console/#search?topic=payments&key=payment-2")
        # an expired token is refused for every request of the view
        page.evaluate("sessionStorage.setItem('tiered-index-token', 'ti_ended')")
        page.get_by_role("link", name="Cost").click()
        expect(page.get_by_role("alert").filter(has_text="does not know this token")).to_be_visible()


def test_the_keyboard_is_enough(opened, service):
    page = opened(service)
    expect(page.get_by_label("Topic", exact=True)).to_be_focused()
    page.keyboard.type("orders")
    page.keyboard.press("Tab")
    page.keyboard.type("order-4711")
    page.keyboard.press("Enter")
    expect(rows(page)).to_have_count(1)
    button = rows(page).get_by_role("button")
    for _ in range(30):
        page.keyboard.press("Tab")
        if button.evaluate("one => one === document.activeElement"):
            break
    outline = button.evaluate("one => getComputedStyle(one).outlineStyle")
    assert outline == "solid"
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Message", exact=True)).to_be_focused()
    expect(page.locator("#message dl").first).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#message")).to_be_hidden()
    expect(button).to_be_focused()
    # from the top, past the head, to the content at once
    page.get_by_role("link", name="Skip to the content").focus()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()


def test_health_tells_reasons_and_how_far_answers_reach(opened, indexed):
    problems, late = [], []
    told = {"problems": lambda: problems, "behind": lambda: next(iter(late), None)}
    with on_a_port(indexed.index, **told) as client:
        page = opened(str(client.base_url), "#health")
        expect(page.locator("#ready")).to_have_text("ready")
        check_access(page)
        problems.append("archive: a segment is passed over")
        page.get_by_role("link", name="Files").click()
        page.get_by_role("link", name="Health").click()
        expect(page.locator("#reasons")).to_contain_text("The service is ready")
        expect(page.locator("#reasons")).to_contain_text("archive: a segment is passed over")
        expect(page.locator("#ready")).to_have_text("problem: archive: a segment is passed over")
        check_access(page)
        late.append("follow: it is 9 GB behind")
        page.get_by_role("link", name="Files").click()
        page.get_by_role("link", name="Health").click()
        expect(page.locator("#reasons")).to_contain_text("follow: it is 9 GB behind")
        expect(page.locator("#ready")).to_have_text("not ready: follow: it is 9 GB behind")
    with IndexReader.open(indexed.storage.as_uri()) as reader, on_a_port(reader) as client:
        page = opened(str(client.base_url), "#health")
        expect(page.locator("#fresh")).to_contain_text("/storage: the newest published entry is from 2025-11-01 0")


def test_the_pictures_of_the_docs(opened, service, tmp_path):
    folder = Path(os.environ.get("CONSOLE_IMAGES", tmp_path))
    page = opened(service, "#search?topic=orders&key=order-2", viewport={"width": 1040, "height": 700})
    rows(page).last.get_by_role("button").click()
    expect(page.locator("#message pre")).to_be_visible()
    page.screenshot(path=folder / "console-search.png", full_page=True)
    page.emulate_media(color_scheme="dark")
    page.get_by_role("link", name="Files").click()
    expect(page.locator("#files-table tbody tr")).to_have_count(9)
    page.screenshot(path=folder / "console-files.png", clip={"x": 0, "y": 0, "width": 1040, "height": 420})
    page.emulate_media(color_scheme="light")
    page.get_by_role("link", name="Health").click()
    page.locator("#raw summary").click()
    expect(page.locator("#metrics-table")).to_contain_text("lookups_total")
    page.screenshot(path=folder / "console-health.png", clip={"x": 0, "y": 0, "width": 1040, "height": 700})
    for image in ("console-search.png", "console-files.png", "console-health.png"):
        assert 5_000 < (folder / image).stat().st_size < 300_000


def test_another_token_shows_nothing_of_the_one_before(opened, indexed, tmp_path):
    path = tmp_path / "tokens.json"
    every, some = add_token(path, "every", "read", None), add_token(path, "some", "read", ["pay"])
    with on_a_port(indexed.index, tokens=path) as client:
        page = opened(str(client.base_url), f"#token={every}&search?topic=orders&key=order-4711")
        expect(rows(page)).to_have_count(1)
        # as after a revocation
        page.evaluate("sessionStorage.setItem('tiered-index-token', 'ti_ended')")
        page.get_by_role("link", name="Cost").click()
        page.get_by_label("Token", exact=True).fill(some)
        page.keyboard.press("Enter")
        expect(page.locator("#cost-table tbody tr")).to_have_count(1)
        page.get_by_role("link", name="Search").click()
        expect(page.locator("#search-view")).to_be_visible()
        expect(rows(page)).to_have_count(0)


def test_a_proxy_that_answers_for_the_service_does_not_make_it_ready(opened, service):
    page = opened(service)
    expect(page.locator("#ready")).to_have_text("ready")
    page.route("**/readyz", lambda route: route.fulfill(status=503, json={"message": "no upstream"}))
    page.get_by_role("link", name="Health").click()
    expect(page.locator("#ready")).to_have_text("not ready: it can’t be reached")
    expect(page.locator("#reasons")).to_contain_text("This page keeps trying.")
