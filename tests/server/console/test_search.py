"""The console's search in a browser, over real sockets: answers, their gaps, and errors."""

import re
import threading

import pytest
from playwright.sync_api import expect

from tests.server.conftest import PATIENCE_S, instead_of_query, on_a_port
from tests.server.console.pages import BEGIN_MS, HOSTILE, MANY, check_access, drawn, rows, search, status
from tests.server.test_http import raising
from tiered_index import IndexReader, IndexService
from tiered_index.errors import StorageUnavailable

pytestmark = pytest.mark.long


def test_a_search_shows_entries_and_the_files_that_it_read(opened, service):
    # times are UTC, in any time zone of the user
    page = opened(service, timezone_id="Pacific/Apia")
    search(page, key="order-4711")
    expect(status(page)).to_have_text("1 entry: the answer is complete.")
    expect(rows(page)).to_contain_text("2025-11-01 03:00:00Z")
    # the address has the lookup
    assert page.url.endswith("#search?topic=orders&key=order-4711")
    sums = page.locator("#explain-sums")
    expect(sums).to_contain_text(re.compile(r"\d files? read.*excluded by filter: \d requests?, .*¢"))
    picture = page.locator("#explain-chart [role=img]")
    expect(picture).to_have_attribute(
        "aria-label", re.compile(r"Files on a time axis: \d files read, \d files excluded by filter")
    )
    assert drawn(page, "#explain-chart", "--read") and drawn(page, "#explain-chart", "--filter")
    # a bar names its file: the one from three to half past in a picture of nine hours
    picture.scroll_into_view_if_needed()
    plot = page.locator("#explain-chart .u-over").bounding_box()
    page.mouse.move(plot["x"] + plot["width"] * 0.356, plot["y"] + 23)
    note = page.locator("#explain-chart .under")
    expect(note).to_contain_text("2025-11-01 03:00:00Z to 2025-11-01 03:30:00Z: read, storage")
    page.get_by_text("The files as a table").click()
    expect(page.locator("#explain-table tbody tr")).to_have_count(9)
    check_access(page)


def test_results_come_as_they_are_found_and_can_be_stopped(opened, service, monkeypatch):
    go_on, real = threading.Event(), IndexService.query

    def held(self, topic, key, begin_ms, end_ms, max_count, cursor, *rest, **more):
        pages.append(max_count)
        if pages.count(1000) == 2:
            assert go_on.wait(PATIENCE_S)
        return real(self, topic, key, begin_ms, end_ms, max_count, cursor, *rest, **more)

    pages = []
    page = opened(service, "#search?topic=orders&key=busy")
    every = page.get_by_role("button", name="Read all of them")
    expect(status(page)).to_have_text("25 entries so far; there are more.")
    instead_of_query(monkeypatch, held)
    every.click()
    expect(page.locator("#entries .pages")).to_contain_text("1 to 25 of 1,025")
    expect(status(page)).to_have_text("Searching…")
    go_on.set()
    expect(status(page)).to_have_text("1,060 entries: the answer is complete.")
    # once more, and stopped before its end
    go_on.clear()
    pages.clear()
    page.reload()
    every.click()
    expect(page.locator("#entries .pages")).to_contain_text("1 to 25 of 1,025")
    page.get_by_role("button", name="Stop").click()
    expect(status(page)).to_have_text("Stopped: 1,025 entries so far, and there may be more.")
    go_on.set()


def test_a_stream_that_breaks_off_is_not_a_whole_answer(opened, service, monkeypatch):
    real = IndexService.query

    def failing(self, topic, key, begin_ms, end_ms, max_count, *rest, **more):
        pages.append(max_count)
        if pages.count(1000) == 2:
            raise StorageUnavailable("the storage went away")
        return real(self, topic, key, begin_ms, end_ms, max_count, *rest, **more)

    pages = []
    instead_of_query(monkeypatch, failing)
    page = opened(service, "#search?topic=orders&key=busy")
    page.get_by_role("button", name="Read all of them").click()
    expect(status(page)).to_have_text("The search failed: 1,025 entries so far, and there may be more.")
    expect(page.locator("#said [role=alert]")).to_contain_text("the storage went away")
    # the results that were shown already do not repeat
    page.get_by_role("button", name="Try again").click()
    expect(status(page)).to_have_text("1,060 entries: the answer is complete.")
    # a connection that ends in the middle of a line
    page.route("**/v1/query?*", lambda route: route.fulfill(body='{"key_hash": 1, "timestamp_ms": 0}\n{"key_h'))
    page.get_by_role("button", name="Search").click()
    expect(status(page)).to_have_text("The search failed: 1 entry so far, and there may be more.")
    expect(page.locator("#said [role=alert]")).to_contain_text("The answer was cut off")


def test_pages_go_on_by_the_cursor(opened, service):
    page = opened(service)
    search(page)
    expect(status(page)).to_have_text("25 entries so far; there are more.")
    expect(rows(page).first).to_contain_text("paid")
    first = rows(page).first.inner_text()
    page.get_by_role("button", name="Next").click()
    expect(status(page)).to_have_text("32 entries: the answer is complete.")
    expect(rows(page)).to_have_count(7)
    expect(page.locator("#entries .pages")).to_contain_text("26 to 32 of 32")
    # the focus is at the next step
    expect(page.get_by_role("button", name="Previous")).to_be_focused()
    page.keyboard.press("Enter")
    expect(rows(page)).to_have_count(25)
    assert rows(page).first.inner_text() == first
    page.get_by_role("button", name="Size").click()
    expect(page.get_by_role("columnheader", name="Size")).to_have_attribute("aria-sort", "ascending")


def test_an_error_names_the_remedy_and_can_be_retried(opened, service):
    page = opened(service)
    with pytest.MonkeyPatch.context() as patch:
        instead_of_query(patch, raising(StorageUnavailable("the storage is away <b>now</b>")))
        search(page)
        alert = page.get_by_role("alert").filter(has_text="Bad Gateway (502)")
        expect(alert).to_contain_text("the storage is away <b>now</b>")
        expect(alert).to_contain_text("Request ")
    page.get_by_role("button", name="Try again").click()
    expect(status(page)).to_have_text("25 entries so far; there are more.")
    expect(alert).to_have_count(0)
    page.get_by_label("From", exact=True).fill("a while ago")
    page.get_by_role("button", name="Search").click()
    wrong = page.get_by_role("alert").filter(has_text="(400)")
    expect(wrong).to_contain_text("From: 'a while ago' is neither")
    expect(page.get_by_role("button", name="Try again")).to_have_count(0)
    page.get_by_label("From", exact=True).fill("2025-11-02")
    page.get_by_label("To", exact=True).fill("2025-11-01")
    page.get_by_role("button", name="Search").click()
    expect(wrong).to_contain_text("From 2025-11-02 00:00:00Z is after To 2025-11-01 23:59:59Z")
    expect(page.locator("#ready")).to_have_text("ready")
    # the head shows it at once, before its next check
    page.evaluate("for (let timer = 0; timer < 1000; timer += 1) clearInterval(timer)")
    page.context.set_offline(True)
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("alert").filter(has_text="can’t be reached")).to_contain_text("Check that the service runs")
    expect(page.locator("#ready")).to_have_text("not ready: it can’t be reached")


def test_data_of_an_index_is_never_html(opened, service):
    page = opened(service)
    search(page, "orders", HOSTILE)
    rows(page).get_by_role("button").click()
    expect(page.locator("#message pre")).to_have_text(f"<script>window.hacked=1</script>{HOSTILE}")
    expect(page.locator("#message dl").first).to_contain_text(HOSTILE)
    search(page, HOSTILE, HOSTILE + "2")
    expect(status(page)).to_contain_text(f"No match for key {HOSTILE}2 of topic {HOSTILE}")
    search(page, f"{HOSTILE}3", HOSTILE)
    expect(page.locator("#said")).to_contain_text(f"has topic {HOSTILE}3")
    page.get_by_role("link", name="Cost").click()
    expect(page.locator("#cost-table")).to_contain_text(HOSTILE)
    assert page.evaluate("window.hacked") is None
    assert page.locator("main img, main script").count() == 0


def test_a_key_is_searched_in_every_topic(opened, service):
    page = opened(service)
    search(page, "", "order-4711")
    expect(status(page)).to_have_text("1 entry: the answer is complete.")
    expect(page.locator("#said")).to_contain_text("Searched 3 topics.")
    expect(page.get_by_role("columnheader", name="Topic")).to_be_visible()
    expect(rows(page)).to_contain_text("orders")
    check_access(page)
    rows(page).get_by_role("button").click()
    expect(page.locator("#message")).to_contain_text("read from the store’s own files")
    page.reload()
    expect(page.locator("#message")).to_contain_text("read from the store’s own files")
    search(page, "", "busy")
    expect(status(page)).to_have_text("25 entries so far; there are more.")
    page.get_by_role("link", name="More in topic orders").click()
    page.get_by_role("button", name="Next").click()
    expect(status(page)).to_have_text("50 entries so far; there are more.")
    search(page, "", "nothing has it")
    expect(status(page)).to_have_text("No match for key nothing has it of any topic: the answer is complete.")


def test_a_miss_offers_the_key_that_was_meant(opened, service):
    page = opened(service)
    page.get_by_text("Key templates").click()
    page.get_by_label("Templates, separated by spaces").fill("payment-{} order-{}")
    digits = f"0x{b'order-4711'.hex()}"
    meant = (("orders", " Order-4711 "), ("ORDERS", "order-4711"), ("orders", "#4711"), ("", "004711"))
    for topic, key in (*meant, ("orders", digits), ("orders", digits.upper())):
        search(page, topic, key)
        expect(page.locator("#said")).to_contain_text("Keys are exact. These have entries:")
        page.get_by_role("link", name="key order-4711 of topic orders").click()
        expect(status(page)).to_have_text("1 entry: the answer is complete.")
    # they are there the next time
    page.reload()
    expect(page.locator("#templates")).to_have_value("payment-{} order-{}")


def test_times_are_as_people_say_them(opened, service):
    page = opened(service, timezone_id="Asia/Tokyo", locale="en-GB")
    # Tuesday, 4 November 2025, 08:00 in Tokyo: Monday in London
    page.clock.set_fixed_time(BEGIN_MS // 1000 + 71 * 3600)
    begin, end = page.get_by_label("From", exact=True), page.get_by_label("To", exact=True)
    for zone, text, times in (
        ("UTC", "Saturday", ("2025-11-01T00:00:00Z", "2025-11-01T23:59:59Z")),
        ("UTC", "2025-11-01 01:30", ("2025-11-01T01:30:00Z", "")),
        ("here (Asia/Tokyo)", "today", ("2025-11-03T15:00:00Z", "2025-11-04T14:59:59Z")),
        ("here (Asia/Tokyo)", "sat", ("2025-10-31T15:00:00Z", "2025-11-01T14:59:59Z")),
    ):
        page.get_by_label("Time zone").select_option(zone)
        begin.fill(text)
        end.fill("")
        search(page, key="order-4711")
        expect(begin).to_have_value(times[0])
        expect(end).to_have_value(times[1])
    expect(status(page)).to_have_text("1 entry: the answer is complete.")
    expect(rows(page)).to_contain_text("2025-11-01 03:00:00Z")
    expect(rows(page)).to_contain_text("Sat 1 Nov, 12:00:00 here")
    check_access(page)
    # by the calendar, in the chosen zone
    page.locator("#begin-picker").evaluate(
        "picker => { picker.value = '2025-11-01T12:00'; picker.dispatchEvent(new Event('change')); }"
    )
    expect(begin).to_have_value("2025-11-01 12:00")
    page.get_by_role("button", name="Search").click()
    expect(begin).to_have_value("2025-11-01T03:00:00Z")


def test_a_message_has_an_address_and_leads_to_other_keys(opened, service, indexed):
    page = opened(service, "#search?topic=orders&key=order-4711")
    panel = page.locator("#message")
    rows(page).get_by_role("button").click()
    expect(panel).to_contain_text("read from the store’s own files")
    assert re.search(r"&key=order-4711&at=1761966000000-0-\d+$", page.url)
    page.evaluate("document.execCommand = () => { window.copied = document.activeElement.value; }")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.get_by_role("button", name="Copy link").click()
    expect(page.locator("#copied")).to_have_text("Copied.")
    assert page.evaluate("window.copied") == page.url
    # it opens again in another browser, too
    page.reload()
    expect(panel).to_contain_text("read from the store’s own files")
    expect(page.locator("#entries-table tr.chosen")).to_have_count(1)
    check_access(page)
    page.get_by_label("Tree").check()
    expect(panel.locator(".branches")).to_contain_text("id: 12345678901234567890")
    panel.locator(".branches").get_by_text("lines: 3 items").click()
    expect(panel.locator("pre")).to_be_hidden()
    panel.get_by_text("All fields").click()
    expect(panel.locator("table th").filter(has_text="KEYS")).to_have_count(1)
    check_access(page)
    page.get_by_role("button", name="Close").click()
    assert page.url.endswith("#search?topic=orders&key=order-4711")
    expect(rows(page)).to_have_count(1)
    # from an order to all orders of its customer, and back
    rows(page).get_by_role("button").click()
    panel.get_by_role("link", name="customer-7").first.click()
    expect(status(page)).to_have_text("25 entries so far; there are more.")
    expect(panel).to_be_hidden()
    page.go_back()
    expect(panel).to_contain_text("read from the store’s own files")
    page.go_back()
    expect(panel).to_be_hidden()
    with IndexReader.open(indexed.storage.as_uri()) as reader, on_a_port(reader) as client:
        page = opened(str(client.base_url), "#search?topic=orders&key=order-4711")
        rows(page).get_by_role("button").click()
        expect(page.locator("#message")).to_contain_text("the index has the place of the message, but no copy of it")


def test_a_message_is_shown_as_text_json_or_digits(opened, service):
    page = opened(service, "#search?topic=orders&key=order-4711")
    rows(page).get_by_role("button").click()
    body, panel = page.locator("#message pre"), page.locator("#message")
    expect(page.get_by_label("JSON")).to_be_checked()
    # digits that a JavaScript number does not have
    lines = ["{", '  "id": 12345678901234567890,', '  "note": "a, b: c",', '  "lines": [', "    {},", "    [],"]
    lines += ["    {", '      "sku": "A-1",', '      "eur": 1.5', "    }", "  ]", "}"]
    assert body.inner_text().splitlines() == lines
    expect(panel).to_contain_text("read from the store’s own files")
    expect(panel).to_contain_text("2025-11-01 03:00:00Z (1761966000000)")
    page.get_by_label("Text", exact=True).check()
    expect(body).to_have_text(re.compile(r'^\{"id": 12345678901234567890, "note"'))
    page.get_by_label("Hex").check()
    assert body.inner_text().startswith('00000000  7b 22 69 64 22 3a 20 31 32 33 34 35 36 37 38 39  {"id": 123456789\n')
    search(page, key="order-text")
    expect(status(page)).to_have_text("1 entry: the answer is complete.")
    rows(page).get_by_role("button").click()
    expect(body).to_have_text("Grüße, <b>kein JSON</b>")
    expect(page.get_by_label("JSON")).to_be_disabled()
    # a deep document is shown all the same
    deep = (b"[" * 20_000 + b"]" * 20_000).hex()
    digits = "Grüße, <b>kein JSON</b>".encode().hex()
    page.route("**/v1/messages?*", lambda route: route.fulfill(body=route.fetch().text().replace(digits, deep)))
    rows(page).get_by_role("button").click()
    expect(page.get_by_label("JSON")).to_be_checked()
    assert body.text_content().startswith("[\n  [\n    [\n")
    page.unroute("**/v1/messages?*")
    search(page, key="order-bytes")
    rows(page).get_by_role("button").click()
    expect(page.get_by_label("Hex")).to_be_checked()
    expect(page.get_by_label("Text", exact=True)).to_be_disabled()
    # by its id, with any key
    msg_id = panel.locator("dt", has_text="msg_id").first.locator("+ dd").inner_text()
    page.get_by_text("By message id instead").click()
    page.get_by_role("textbox", name="Message id").fill(msg_id)
    page.get_by_role("button", name="Show", exact=True).click()
    expect(panel).to_contain_text(msg_id)
    with page.expect_download() as began:
        page.get_by_role("button", name="Download").click()
    assert began.value.path().read_bytes() == bytes(range(256))
    assert re.fullmatch(r"[\w.-]+\.bin", began.value.suggested_filename)
    # the address has the lookup, and repeats it for another user
    other = opened(page.url.partition("/console/")[0], page.url.partition("/console/")[2])
    expect(other.locator("#message")).to_contain_text(msg_id)
    expect(other.get_by_role("textbox", name="Message id")).to_have_value(msg_id)
    other.close()
    search(page, key="busy")
    # digits as other tools need them
    expect(rows(page).first).to_contain_text(str(1 << 40 | MANY - 1))
    rows(page).first.get_by_role("button").click()
    expect(panel).to_contain_text("missing: no message could be read, for this reason:")
    expect(panel).to_contain_text("after the end of the log")


def test_the_time_range_of_a_search_is_shown_and_seconds_are_questioned(opened, service):
    """A number of seconds is a time of 1970 as milliseconds."""
    page = opened(service)
    seconds = [
        "Searched from 1970-01-21 09:26:04Z to 1970-01-21 09:26:06Z.",
        "1761964200 is read as milliseconds; did you mean 1761964200000?",
        "1761966000 is read as milliseconds; did you mean 1761966000000?",
    ]
    for begin, end, told in (
        ("1761964200", "1761966000", seconds),
        ("", "1761966000000", ["Searched from the beginning to 2025-11-01 03:00:00Z."]),
        ("", "", []),
    ):
        for label, value in (("From", begin), ("To", end)):
            page.get_by_label(label, exact=True).fill(value)
        search(page, key="order-4711")
        notes = page.locator("#said p").filter(has_text=re.compile("^Searched from|is read as milliseconds"))
        expect(notes).to_have_text(told)
        is_found = told is not seconds
        expect(status(page)).to_have_text(re.compile("^1 entry" if is_found else "^No match for key order-4711"))
