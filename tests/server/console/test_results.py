"""The console distinguishes messages in results, and filters, saves and browses them.

`CONSOLE_TASKS=file` writes the seconds of the ten tasks of support to that file.
"""

import csv
import io
import json
import os
import subprocess
import time
from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.rocketmq.archived_store import index_log
from tests.rocketmq.test_archived_queues import archive
from tests.rocketmq.test_archived_queues import made as stored
from tests.server.conftest import index_in, serving
from tests.server.console.pages import BEGIN_MS, check_access, fits, rows, search, status
from tiered_index import IndexReader, erase
from tiered_index.server.tokens import add_token

pytestmark = pytest.mark.long

T = BEGIN_MS
FORMULA = '=HYPERLINK("x"), "y"'
QUOTE = "it's$(>hacked)`x`"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A service with messages of one key, 40 of `orders`, 3 of `order-returns` and 2 of `billing`, and their store."""
    folder = tmp_path_factory.mktemp("results")
    puts = [{"keys": ["7", f"order-{n}"], "body": b"amount %d EUR" % n, "queue_id": n % 2} for n in range(39)]
    puts = [one | {"tags": "paid" if n % 4 else "refused"} for n, one in enumerate(puts)]
    puts.append({"keys": ["7", QUOTE], "tags": "paid", "body": FORMULA.encode()})
    puts += [{"topic": "order-returns", "keys": ["7"], "body": b"returned %d" % n} for n in range(3)]
    puts += [{"topic": "billing", "keys": ["7"], "body": b"billed"}] * 2
    puts = [{**one, "store_ms": T + n * 1000} for n, one in enumerate(puts)]
    messages = stored(folder / "store", puts)
    tokens = folder / "tokens.json"
    team = add_token(tokens, "team", "read", ["order"])
    with index_in(folder) as index:
        index_log(index, folder / "store")
        with serving(index, store=folder / "store") as client:
            with serving(index, store=folder / "store", tokens=tokens) as guarded:
                yield str(client.base_url), messages, f"{guarded.base_url}", team


def cells(page, title):
    """Return the texts of a column."""
    titles = page.locator("#entries-table thead th").all_inner_texts()
    return [row.locator("td").nth(titles.index(title)).inner_text() for row in rows(page).all()]


def test_rows_tell_messages_apart_and_columns_can_be_chosen(opened, shop):
    page = opened(shop[0], "#search?topic=orders&key=7")
    expect(rows(page).nth(1)).to_contain_text("amount 38 EUR")
    assert cells(page, "Body")[:2] == [FORMULA, "amount 38 EUR"]
    assert cells(page, "Tags")[:4] == ["paid", "paid", "paid", "refused"]
    assert {*cells(page, "Keys")} == {"2"}
    assert len({*cells(page, "Message id")}) == 25
    check_access(page)
    page.locator("summary", has_text="Columns").click()
    page.get_by_label("Size", exact=True).uncheck()
    expect(page.get_by_role("columnheader", name="Size")).to_have_count(0)
    page.reload()
    expect(rows(page).nth(1)).to_contain_text("amount 38 EUR")
    expect(page.get_by_role("columnheader", name="Size")).to_have_count(0)
    # the console reads the next page once this one is shown
    page.get_by_role("button", name="Next", exact=True).click()
    expect(rows(page).last).to_contain_text("amount 0 EUR")
    expect(page.locator("#columns input")).to_have_count(7)


def test_results_are_filtered_by_the_service(opened, shop):
    page = opened(shop[0], "#search?topic=orders&key=7")
    expect(status(page)).to_have_text("25 entries so far; there are more.")
    box = page.get_by_label("Only messages with this text")
    box.fill("REFUSED")
    page.keyboard.press("Enter")
    expect(status(page)).to_have_text("10 entries with “REFUSED”: the answer is complete.")
    assert page.url.endswith("#search?topic=orders&key=7&having=REFUSED")
    expect(rows(page)).to_have_count(10)
    page.reload()
    expect(rows(page)).to_have_count(10)
    check_access(page)
    box.fill("amount")
    page.get_by_role("button", name="Filter").click()
    expect(status(page)).to_have_text("25 entries with “amount” so far; there are more.")
    page.get_by_role("button", name="Read all of them").click()
    expect(status(page)).to_have_text("39 entries with “amount”: the answer is complete.")
    box.fill("nothing")
    page.keyboard.press("Enter")
    expect(status(page)).to_have_text("No match for key 7 of topic orders with “nothing”: the answer is complete.")
    # another key's results have no filter
    search(page, "orders", "order-1")
    expect(status(page)).to_have_text("1 entry: the answer is complete.")
    expect(box).to_have_value("")


def test_some_topics_are_searched_together(opened, shop):
    page = opened(shop[0])
    for topics, count, some in (
        ("orders, billing", 42, "billing"),
        ("order*", 43, "order-returns"),
        ("billing,", 2, "billing"),
    ):
        search(page, topics, "7")
        expect(page.locator("#said")).to_contain_text("Searched")
        page.get_by_label("Only messages with this text").fill("")
        texts = page.locator("#entries-table")
        expect(texts).to_contain_text(some)
        if count == 2:
            expect(status(page)).to_have_text("2 entries: the answer is complete.")
    search(page, "order*", "7")
    page.get_by_label("Only messages with this text").fill("returned")
    page.keyboard.press("Enter")
    expect(status(page)).to_have_text("3 entries with “returned”: the answer is complete.")
    rows(page).first.get_by_role("button").click()
    expect(page.locator("#message pre")).to_have_text("returned 2")
    # the token's own topics alone
    page = opened(shop[2], f"#token={shop[3]}&search?topic=billing, order*&key=7")
    expect(page.locator("#said")).to_contain_text("Searched 2 topics.")
    expect(page.locator("#entries-table")).not_to_contain_text("billing")


def test_one_steps_from_message_to_message(opened, shop):
    page = opened(shop[0], "#search?topic=orders&key=7")
    expect(rows(page).nth(1)).to_contain_text("amount 38 EUR")
    rows(page).nth(23).get_by_role("button").click()
    body, behind = page.locator("#message pre"), page.get_by_role("button", name="Next message")
    expect(body).to_have_text("amount 16 EUR")
    behind.click()
    expect(body).to_have_text("amount 15 EUR")
    assert page.locator("tr.chosen").count() == 1
    # over the end of the messages that were read
    behind.click()
    expect(body).to_have_text("amount 14 EUR")
    expect(status(page)).to_have_text("40 entries: the answer is complete.")
    expect(behind).to_be_focused()
    page.get_by_role("button", name="Previous message").click()
    expect(body).to_have_text("amount 15 EUR")
    rows(page).first.get_by_role("button").click()
    expect(page.get_by_role("button", name="Previous message")).to_be_disabled()
    check_access(page)
    page.set_viewport_size({"width": 390, "height": 800})
    assert fits(page)
    # the buttons cover nothing
    bottom = page.locator("#message-buttons").evaluate("one => one.getBoundingClientRect().bottom")
    assert bottom <= page.locator("#message-content").evaluate("one => one.getBoundingClientRect().top")


def test_a_message_that_is_not_there_says_why(opened, tmp_path):
    store, storage = tmp_path / "store", (tmp_path / "storage").as_uri()
    puts = ({"keys": [f"order-{n}", f"customer-{n}"], "body": b"body-%03d" % n * 20} for n in range(60))
    messages = stored(store, puts)
    with index_in(tmp_path, offset_space="commitlog") as index:
        index_log(index, store)
        index.put("orders", 0, "order-late", 1 << 30, 100, messages[-1].store_ms)
        index.seal()
        index.run_lifecycle()
        sorted((store / "commitlog").iterdir())[0].unlink()
        segment = sorted((store / "commitlog").iterdir())[-2]
        damaged = next(one for one in messages if one.physical_offset >= int(segment.name)).index_keys[0]
        digits = b"body-" + damaged.removeprefix("order-").encode().rjust(3, b"0")
        segment.write_bytes(segment.read_bytes().replace(digits, b"X" * len(digits), 1))
        with serving(index, store=store) as client:
            near = str(client.base_url)
            tells(opened(near), "order-0", "expired: the broker has deleted it, and no archive has it", "has deleted")
            tells(opened(near), damaged, "missing: no message could be read, for this reason:", "CRC")
            tells(opened(near), "order-late", "missing: no message could be read", "after the end of the log")
        kept = next(one for one in messages if one.physical_offset >= 4096).index_keys[0]
        assert archive(index, store)
    erase(storage, "orders", keys=kept, yes=True, now=True, grace_s=0)
    with IndexReader.open(storage) as reader, serving(reader) as client:
        far, other = str(client.base_url), kept.replace("order", "customer")
        tells(opened(far), other, "erased from its archived segment", "erased")
        tells(opened(far), "order-late", "missing: no message could be read", "no archived segment has the message")


def tells(page, key, state, problem):
    """Check the text of a page about the only message of a key."""
    search(page, "orders", key)
    expect(rows(page)).to_have_count(1)
    rows(page).get_by_role("button").click()
    expect(page.locator("#message .state")).to_contain_text(state)
    expect(page.locator("#message .warning").first).to_contain_text(problem)
    check_access(page)


def test_shown_results_can_be_saved(opened, shop):
    page = opened(shop[0], "#search?topic=orders&key=7")
    page.get_by_role("button", name="Read all of them").click()
    expect(status(page)).to_have_text("40 entries: the answer is complete.")
    page.get_by_role("button", name="Size").click()
    saved = {}
    for kind in ("NDJSON", "CSV"):
        with page.expect_download() as began:
            page.get_by_role("button", name=f"Save as {kind}").click()
        assert began.value.suggested_filename == f"7.{kind.lower()}"
        saved[kind] = began.value.path().read_text()
    lines = [json.loads(line) for line in saved["NDJSON"].splitlines()]
    assert {one["message"]["body"] for one in lines} == {FORMULA, *(f"amount {n} EUR" for n in range(39))}
    assert {one["state"] for one in lines} == {"local"}
    assert lines[0]["item"]["size"] <= lines[-1]["item"]["size"]
    head, *table = csv.reader(io.StringIO(saved["CSV"]))
    assert head == ["Message of (UTC)", "Queue", "Offset", "Size", "Tags", "Message id", "Keys", "Body"]
    assert [int(row[3]) for row in table] == sorted(int(row[3]) for row in table)
    # so that spreadsheets do not read it as a formula
    assert f"'{FORMULA}" in [row[-1] for row in table] and len(table) == 40


def test_a_save_waits_for_messages_that_are_still_read(opened, shop):
    page = opened(shop[0])
    held = []
    page.route("**/v1/messages?*", lambda route: held.append(route))
    for kind in ("NDJSON", "CSV"):
        search(page, "orders", "7")
        expect(status(page)).to_have_text("25 entries so far; there are more.")
        expect(rows(page).first).to_contain_text("…")
        with page.expect_download() as began:
            page.get_by_role("button", name=f"Save as {kind}").click()
            # the file is about the first search
            search(page, "", "order-1")
            expect(status(page)).to_have_text("1 entry: the answer is complete.")
            while held:
                held.pop().continue_()
        assert began.value.suggested_filename == f"7-part.{kind.lower()}"
        text = began.value.path().read_text()
        assert all(f"amount {n} EUR" in text for n in range(15, 39)), text
        assert "Topic" not in text.splitlines()[0]


def shell(line, folder, **environment):
    """Return the output of a command line."""
    env = {"PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run(["bash", "-ec", line], capture_output=True, timeout=60, check=False, cwd=folder, env=env)
    assert done.returncode == 0, (line, done.stderr)
    return done.stdout


def test_a_search_is_shown_as_shell_commands(opened, shop, tmp_path):
    page = opened(shop[0])
    page.get_by_label("From", exact=True).fill("2025-11-01 00:00")
    search(page, "orders", QUOTE)
    expect(status(page)).to_have_text("1 entry: the answer is complete.")
    page.locator("#commands summary").click()
    curl, mqadmin = page.locator("#commands code").all_inner_texts()
    answer = shell(curl, tmp_path, no_proxy="*")
    assert [one["message"]["body"] for one in json.loads(answer)["messages"]] == [FORMULA]
    echoed = shell(mqadmin.replace("mqadmin", "printf '%s\\n'", 1), tmp_path, NAMESRV="host:9876")
    expected = ["queryMsgByKey", "-n", "host:9876", "-t", "orders", "-k", QUOTE, "-b", str(BEGIN_MS)]
    assert echoed.decode().splitlines() == expected
    assert not any(tmp_path.iterdir())
    rows(page).get_by_role("button").click()
    page.locator("#message summary", has_text="As a command").click()
    expect(page.locator("#message code").nth(1)).to_contain_text('mqadmin queryMsgById -n "$NAMESRV" -i \'')
    page.evaluate("document.execCommand = () => { window.copied = document.activeElement.value; }")
    page.evaluate("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
    page.locator("#commands").get_by_role("button", name="Copy as mqadmin").click()
    assert page.evaluate("window.copied") == mqadmin
    check_access(page)


def test_a_topic_is_browsed_around_a_moment(opened, shop):
    page = opened(shop[0], "#browse")
    expect(page.get_by_label("Topic to browse")).to_be_focused()
    page.keyboard.type("orders")
    page.get_by_label("Moment").fill("2025-11-01 00:00:20")
    page.keyboard.press("Enter")
    table = page.locator("#browse-table tbody tr")
    expect(page.locator("#browse-status")).to_contain_text(
        "25 messages, from 2025-11-01 00:00:08Z to 2025-11-01 00:00:32Z"
    )
    expect(table.nth(12)).to_contain_text("amount 20 EUR")
    check_access(page)
    page.get_by_role("link", name="Later").click()
    expect(table.first).to_contain_text("amount 33 EUR")
    expect(page.locator("#later")).to_have_text("Nothing later")
    page.reload()
    expect(table.first).to_contain_text("amount 33 EUR")
    page.go_back()
    expect(table.nth(12)).to_contain_text("amount 20 EUR")
    page.get_by_role("link", name="Earlier").click()
    expect(table.last).to_contain_text("amount 7 EUR")
    # a message opens, and a link leads to the messages around it
    table.last.get_by_role("link").click()
    expect(page.locator("#message pre")).to_have_text("amount 7 EUR")
    page.get_by_role("link", name="Messages around it in its queue").click()
    expect(page.get_by_label("Queue number")).to_have_value("1")
    expect(page.locator("#browse-status")).to_contain_text("1 queue of topic orders with 19 messages at most.")
    page.set_viewport_size({"width": 390, "height": 800})
    assert fits(page)
    page.get_by_label("Topic to browse").fill("nowhere")
    page.get_by_role("button", name="Browse").click()
    expect(page.locator("#browse-said")).to_contain_text("topic 'nowhere' has no queue 1 here")
    expect(table).to_have_count(0)
    # a token sees nothing of another topic's messages
    page = opened(shop[2], f"#token={shop[3]}&browse?topic=billing&at_ms={T}")
    expect(page.locator("#browse-said")).to_contain_text("the token is not for topic 'billing'")
    expect(page.locator("#browse-table tbody tr")).to_have_count(0)


class Engineer:
    """Uses a page, and counts keystrokes and clicks."""

    def __init__(self, page):
        self.page, self.typed, self.characters, self.clicks = page, 0, 0, 0

    def seconds(self):
        """Return the user's seconds by the keystroke-level model, without reading and waiting.

        A click is thought of (1.35), pointed at (1.1) and made (0.2). A field adds two moves of the hand between mouse
        and keyboard (0.8), and each character takes 0.28.
        """
        return round(2.65 * self.clicks + 3.45 * self.typed + 0.28 * self.characters)

    def type(self, label, text):
        self.typed += 1
        self.characters += len(text)
        self.page.get_by_label(label, exact=True).fill(text)

    def choose(self, label, option):
        self.clicks += 1
        self.page.get_by_label(label, exact=True).select_option(option)

    def click(self, name, role="button", within="body"):
        self.clicks += 1
        self.page.locator(within).get_by_role(role, name=name, exact=True).click()

    def open(self, text):
        self.clicks += 1
        self.page.locator("summary", has_text=text).click()

    def read(self, text):
        """Open the row with this text."""
        self.clicks += 1
        rows(self.page).filter(has_text=text).first.get_by_role("button").click()

    def sees(self, text, within="#message"):
        expect(self.page.locator(within)).to_contain_text(text)


def find_an_order(user):
    user.type("Key", "order-7")
    user.click("Search")
    user.read("amount 7 EUR")
    user.sees("amount 7 EUR")


def find_what_a_customer_says(user):
    user.open("Key templates")
    user.type("Templates, separated by spaces", "order-{}")
    user.type("Key", "#00012")
    user.type("From", "Saturday")
    user.click("Search")
    user.click("key order-12 of topic orders", "link")
    user.read("amount 12 EUR")
    user.sees("amount 12 EUR")


def find_a_payment(user):
    user.type("Key", "7")
    user.click("Search")
    user.type("Only messages with this text", "amount 3 eur")
    user.click("Filter")
    user.read("amount 3 EUR")
    user.sees("amount 3 EUR")


def list_refused_orders(user):
    user.type("Topic", "order*")
    user.type("Key", "7")
    user.click("Search")
    user.type("Only messages with this text", "refused")
    user.click("Filter")
    user.sees("10 entries", "#status")
    with user.page.expect_download():
        user.click("Save as CSV")


def tell_the_customers_time(user):
    user.choose("Time zone", "here (Asia/Tokyo)")
    user.type("Key", "order-7")
    user.click("Search")
    user.sees("09:00:07 here", "#entries-table")


def follow_what_came_next(user):
    user.type("Topic", "orders")
    user.type("Key", "7")
    user.click("Search")
    user.read("amount 30 EUR")
    user.sees("amount 30 EUR", "#message pre")
    user.click("Previous message")
    user.sees("amount 31 EUR", "#message pre")


def follow_a_customer(user):
    user.type("Key", "order-7")
    user.click("Search")
    user.read("amount 7 EUR")
    user.click("7", "link", "#message dl")
    user.sees("25 entries", "#status")


def see_what_else_happened(user):
    user.type("Key", "order-7")
    user.click("Search")
    user.read("amount 7 EUR")
    user.click("Messages around it in its queue", "link")
    user.sees("amount 5 EUR", "#browse-table")


def find_a_message_without_a_key(user):
    user.click("Browse", "link", "nav")
    user.type("Topic to browse", "orders")
    user.type("Moment", "2025-11-01 00:00:20")
    user.click("Browse")
    user.sees("amount 20 EUR", "#browse-table")


def hand_it_to_an_engineer(user):
    user.type("Key", "order-7")
    user.click("Search")
    user.read("amount 7 EUR")
    user.open("All fields")
    user.page.locator("#message summary", has_text="As a command").click()
    user.clicks += 1
    user.click("Copy as curl", within="#message")
    user.sees("Copied.", "#message .commands")


TASKS = [find_an_order, find_what_a_customer_says, find_a_payment, list_refused_orders, tell_the_customers_time]
TASKS += [follow_what_came_next, follow_a_customer, see_what_else_happened, find_a_message_without_a_key]
TASKS += [hand_it_to_an_engineer]


def test_ten_tasks_of_support_take_few_clicks(opened, shop):
    # fields, clicks and seconds of each; docs/service.md has the greatest
    told = [(1, 2, 11), (3, 4, 27), (2, 3, 18), (3, 3, 22), (1, 2, 11), (2, 3, 17), (1, 3, 13), (1, 3, 13), (2, 2, 19)]
    told.append((1, 5, 19))
    counted, waited = [], []
    page = opened(shop[0], timezone_id="Asia/Tokyo", locale="en-GB")
    # Sunday
    page.clock.set_fixed_time(BEGIN_MS / 1000 + 36 * 3600)
    for task in TASKS:
        # as on the first day
        page.evaluate("localStorage.clear()")
        page.goto("about:blank")
        began_s = time.monotonic()
        page.goto(f"{shop[0]}/console/")
        user = Engineer(page)
        task(user)
        waited.append(f"{task.__name__} {time.monotonic() - began_s:.2f} s\n")
        counted.append((user.typed, user.clicks, user.seconds()))
    assert counted == told
    if "CONSOLE_TASKS" in os.environ:
        Path(os.environ["CONSOLE_TASKS"]).write_text("".join(waited))


def test_messages_that_a_filter_could_not_read_are_named_over_all_pages(opened, shop):
    page = opened(shop[0])
    gone = {
        "file": "0001", "place": "storage", "outcome": "failed", "begin_ms": T, "end_ms": T, "requests": 1, "bytes": 0,
        "cost_usd": 0.0, "elapsed_ms": 0.0, "matched": 0, "error": "it is gone", "source": None,
    }  # fmt: skip
    asked = []

    def first_page_lacks_a_file(route):
        answer = route.fetch().json()
        asked.append(route.request.url)
        if "cursor=" not in route.request.url:
            answer |= {"status": "partial", "failed": [gone]}
        route.fulfill(json=answer)

    page.route("**/v1/messages?*", first_page_lacks_a_file)
    page.goto(f"{shop[0]}/console/#search?topic=orders&key=7&having=amount")
    expect(status(page)).to_have_text("25 entries with “amount”, and some may be missing.")
    page.get_by_role("button", name="Read all of them").click()
    expect(status(page)).to_have_text("39 entries with “amount”, and some may be missing.")
    expect(page.locator("#missing")).to_contain_text("0001 (storage)")
    # several topics
    page.goto(f"{shop[0]}/console/#search?topic=order*&key=7&having=returned")
    expect(status(page)).to_have_text("3 entries with “returned”, and some may be missing.")
    expect(page.locator("#missing")).to_contain_text("0001 (storage)")
    # messages that could not be read
    page.unroute("**/v1/messages?*")
    none = {"messages": [], "status": "partial", "cursor": None, "failed": [gone]}
    page.route("**/v1/messages?*", lambda route: route.fulfill(json=none))
    page.goto(f"{shop[0]}/console/#search?topic=orders&key=order-3")
    expect(page.locator("#missing")).to_contain_text("Not known: messages of these files could not be read")
    expect(rows(page).first).to_contain_text("not known")


def test_a_message_that_may_be_in_an_unread_part_is_not_known(opened, shop):
    page = opened(shop[0])
    gone = {"file": "0001", "place": "storage", "begin_ms": T, "end_ms": T, "error": "it is gone", "source": None}
    unread = {"messages": [], "status": "partial", "cursor": None, "failed": [gone], "collisions": 0}
    full = unread | {"status": "truncated", "cursor": "more", "failed": []}
    for answer, said in (
        (unread, ["These files could not be read:", "0001 (storage)", "it is gone"]),
        (full, ["This second has too many messages of this key."]),
        (full | {"cursor": None}, ["The index no longer has this entry."]),
    ):
        page.route("**/v1/messages?*", answering(json.dumps(answer)))
        search(page, "orders", "order-3")
        expect(rows(page)).to_have_count(1)
        rows(page).get_by_role("button").click()
        state = "not known" if answer["failed"] or answer["cursor"] else "missing"
        expect(page.locator("#message .state")).to_contain_text(f"{state}: ")
        for one in said:
            expect(page.locator("#message")).to_contain_text(one)
        check_access(page)
        page.unroute("**/v1/messages?*")


def test_the_filter_is_there_only_with_something_to_filter(opened, shop):
    page = opened(shop[0], "#search?topic=orders&key=none")
    expect(status(page)).to_contain_text("No match for key none")
    box = page.get_by_label("Only messages with this text")
    expect(box).to_be_hidden()
    page.route("**/v1/query?*", lambda route: route.fulfill(status=502, json={"status": 502, "detail": "away"}))
    search(page, "orders", "7")
    expect(status(page)).to_have_text("The search failed.")
    expect(box).to_be_hidden()
    page.unroute("**/v1/query?*")
    search(page, "orders", "7")
    expect(box).to_be_visible()
    box.fill("nothing")
    page.keyboard.press("Enter")
    # so that the user can undo it
    expect(status(page)).to_contain_text("No match for key 7 of topic orders with “nothing”")
    expect(box).to_be_visible()


def answering(body):
    return lambda route: route.fulfill(body=body)


def test_an_answer_that_broke_off_is_reported(opened, shop):
    page = opened(shop[0])
    page.route("**/v1/browse?*", answering('{"messages": ['))
    page.goto(f"{shop[0]}/console/#browse?topic=orders&at_ms={T}")
    expect(page.locator("#browse-said [role=alert]")).to_contain_text("The answer was cut off")


def test_messages_that_can_not_be_read_are_counted_by_browse(opened, shop):
    page = opened(shop[0])

    def damaged(route):
        answer = route.fetch().json()
        answer["messages"][1] |= {"message": None, "problem": "this message can't be read"}
        route.fulfill(json=answer | {"status": "partial"})

    page.route("**/v1/browse?*", damaged)
    page.goto(f"{shop[0]}/console/#browse?topic=orders&at_ms={T}")
    expect(page.locator("#browse-status")).to_contain_text("1 message of these can’t be read.")


def test_control_characters_of_a_key_reach_no_terminal(opened, shop, tmp_path):
    page = opened(shop[0])
    keys = ["\x15touch hacked\n", "\x1b[201~\rtouch hacked\r", "it's \\ \x7f\x85\u2028$(touch hacked) ß"]
    shown = page.evaluate(
        "async (keys) => { const { quoted } = await import('./commands.js'); return keys.map(quoted); }", keys
    )
    for key, text in zip(keys, shown, strict=True):
        assert text.isprintable(), text
        assert shell(f"printf %s {text}", tmp_path, LANG="C.UTF-8").decode() == key
    assert not any(tmp_path.iterdir())


def test_no_cell_of_a_saved_table_is_a_formula(opened, shop):
    page = opened(shop[0])
    guarded = {
        "=1+1": "'=1+1",
        " =1+1": "' =1+1",
        "\n=1+1": "'\n'=1+1",
        "\uff1d1+1": "'\uff1d1+1",
        "\t@SUM(A1)": "'\t'@SUM(A1)",
        "\r+1": "'\r'+1",
        "-1": "'-1",
        "a;=1+1": "a;'=1+1",
        "a\t-1\r\n +2;\u3000@B": "a\t'-1\r\n' +2;'\u3000@B",
        "plain = text; and 1-1": "plain = text; and 1-1",
    }
    bodies = list(guarded)
    text = page.evaluate(
        """async (bodies) => { const { csv } = await import('./results.js');
        return csv(bodies.map((body) => ({ body })), [{ title: "Body", by: (row) => row.body }]); }""",
        bodies,
    )
    _, *table = csv.reader(io.StringIO(text, newline=""))
    assert [row[0] for row in table] == list(guarded.values())
    # a spreadsheet that splits at semicolons or tabs sees the same cells
    assert all(line.startswith(("'", '"')) or not set(";\t") & set(line) for line in text.split("\r\n"))


def test_a_message_on_a_page_that_was_not_read_is_not_known(opened, shop):
    page = opened(shop[0])
    full = {"messages": [], "status": "truncated", "cursor": "more", "failed": [], "collisions": 0}
    page.route("**/v1/messages?*", answering(json.dumps(full)))
    search(page, "orders", "order-3")
    expect(rows(page)).to_contain_text("not known")


def test_a_column_may_be_named_state_or_message(opened, shop):
    page = opened(shop[0])
    item = {"topic": "orders", "state": 7, "message": "ab"}
    text = page.evaluate(
        """async (item) => { const { ndjson } = await import('./results.js');
        return ndjson([{ ...item, found: { state: "local", message: null } }]); }""",
        item,
    )
    assert json.loads(text) == {"item": item, "state": "local", "message": None}


def test_a_message_by_its_id_has_no_neighbours(opened, shop):
    page = opened(shop[0], "#search?topic=orders&key=7")
    rows(page).first.get_by_role("button").click()
    expect(page.get_by_role("button", name="Next message")).to_be_visible()
    # a search that is still under way
    page.route("**/v1/query?*", lambda route: None)
    page.goto(f"{shop[0]}/console/#search?topic=orders&key=order-1")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    page.goto(f"{shop[0]}/console/#search?id={shop[1][0].offset_msg_id}")
    expect(page.locator("#message .state")).to_contain_text("read from the store’s own files")
    for name in ("Stop", "Next message", "Previous message"):
        expect(page.get_by_role("button", name=name)).to_be_hidden()


def test_long_offsets_are_sorted_as_numbers(opened, shop):
    page = opened(shop[0])
    given = ["10000000000000000", "9007199254740993", 5]
    found = page.evaluate(
        """async (given) => { const { NUMBER, Table, column } = await import('./page.js');
        const table = new Table(document.createElement("div"), "", [column("Offset", "offset", String, NUMBER)]);
        table.show(given.map((offset) => ({ offset })));
        table.sort("Offset");
        return table.ordered().map(({ offset }) => offset); }""",
        given,
    )
    assert found == given[::-1]


def test_a_filter_over_several_topics_counts_its_requests(opened, shop):
    page = opened(shop[0])

    def costly(route):
        answer = route.fetch().json()
        answer["explain"]["requests"] = 7
        route.fulfill(json=answer)

    page.route("**/v1/messages?*", costly)
    page.goto(f"{shop[0]}/console/#search?topic=order*&key=7&having=returned")
    expect(status(page)).to_have_text("3 entries with “returned”: the answer is complete.")
    expect(page.locator("#explain-sums")).to_contain_text("14 requests")


def test_further_messages_of_an_id_are_named(opened, shop):
    page = opened(shop[0])
    page.route("**/v1/messages/*", lambda route: route.fulfill(json=route.fetch().json() | {"cursor": "more"}))
    page.goto(f"{shop[0]}/console/#search?id={shop[1][0].offset_msg_id}")
    expect(page.locator("#message")).to_contain_text("More messages have this id.")
