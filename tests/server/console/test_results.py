"""The console distinguishes messages in results, and filters, saves and browses them."""

import csv
import io
import json
import re
import subprocess
from typing import get_args

import pytest
from playwright.sync_api import expect

from tests.rocketmq.archived_store import index_log
from tests.rocketmq.test_archived_queues import write_store as stored
from tests.server.conftest import index_in, on_a_port
from tests.server.console.pages import BEGIN_MS, check_access, fits, rows, search, status
from tiered_index.server.http.tokens import add_token
from tiered_index.service.read.answers.messages import MessageState

pytestmark = pytest.mark.long

T = BEGIN_MS
FORMULA = '=HYPERLINK("x"), "y"'
QUOTE = "it's$(>hacked)`x`"


@pytest.fixture(scope="module")
def shop(tmp_path_factory):
    """A service with messages of one key, 40 of `orders`, 3 of `order-returns` and 2 of `billing`, and their store."""
    folder = tmp_path_factory.mktemp("results")
    puts = [{"keys": ["7", f"order-{n}"], "body": b"amount %d EUR" % n, "queue_id": n % 2} for n in range(39)]
    puts = [put | {"tags": "paid" if n % 4 else "refused"} for n, put in enumerate(puts)]
    puts.append({"keys": ["7", QUOTE], "tags": "paid", "body": FORMULA.encode()})
    puts += [{"topic": "order-returns", "keys": ["7"], "body": b"returned %d" % n} for n in range(3)]
    puts += [{"topic": "billing", "keys": ["7"], "body": b"billed"}] * 2
    puts = [{**put, "store_ms": T + n * 1000} for n, put in enumerate(puts)]
    messages = stored(folder / "store", puts)
    tokens = folder / "tokens.json"
    team = add_token(tokens, "team", "read", ["order"])
    with index_in(folder) as index:
        index_log(index, folder / "store")
        with on_a_port(index, store=folder / "store") as client:
            with on_a_port(index, store=folder / "store", tokens=tokens) as guarded:
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
    # another key's results have no filter
    search(page, "orders", "order-1")
    expect(status(page)).to_have_text("1 entry: the answer is complete.")
    expect(box).to_have_value("")


def test_some_topics_are_searched_together(opened, shop):
    page = opened(shop[0])
    for topics, some in (("orders, billing", "billing"), ("order*", "order-returns")):
        search(page, topics, "7")
        expect(page.locator("#said")).to_contain_text("Searched")
        expect(page.locator("#entries-table")).to_contain_text(some)
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


def test_a_message_that_is_not_there_says_why(opened, shop):
    """Each state that a service tells has its words, beside the service's reason."""
    page = opened(shop[0])
    for state in {*get_args(MessageState)} - {"local", "archived"}:

        def withheld(route, *, state=state):
            document = route.fetch().json()
            for row in document["messages"]:
                row |= {"message": None, "state": state, "problem": f"why it is {state}"}
            route.fulfill(json=document)

        page.route("**/v1/messages?*", withheld)
        search(page, "orders", "order-1")
        expect(rows(page)).to_have_count(1)
        rows(page).get_by_role("button").click()
        words = "no such topic" if state == "no_topic" else state
        expect(page.locator("#message .state")).to_have_text(re.compile(rf"^{words}\W.{{10,}}"))
        expect(page.locator("#message .warning").first).to_contain_text(f"why it is {state}")
        page.unroute("**/v1/messages?*")
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
    assert {line["message"]["body"] for line in lines} == {FORMULA, *(f"amount {n} EUR" for n in range(39))}
    assert {line["state"] for line in lines} == {"local"}
    assert lines[0]["item"]["size"] <= lines[-1]["item"]["size"]
    head, *table = csv.reader(io.StringIO(saved["CSV"]))
    assert head == ["Message of (UTC)", "Queue", "Offset", "Size", "Tags", "Message id", "Keys", "Body"]
    assert [int(row[3]) for row in table] == sorted(int(row[3]) for row in table)
    # so that spreadsheets do not read it as a formula
    assert f"'{FORMULA}" in [row[-1] for row in table] and len(table) == 40


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
    assert [row["message"]["body"] for row in json.loads(answer)["messages"]] == [FORMULA]
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
    page.get_by_label("Topic to browse").fill("nowhere")
    page.get_by_role("button", name="Browse").click()
    expect(page.locator("#browse-said")).to_contain_text("topic 'nowhere' has no queue 1 here")
    expect(table).to_have_count(0)
    # a token sees nothing of another topic's messages
    page = opened(shop[2], f"#token={shop[3]}&browse?topic=billing&at_ms={T}")
    expect(page.locator("#browse-said")).to_contain_text("the token is not for topic 'billing'")
    expect(page.locator("#browse-table tbody tr")).to_have_count(0)


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
        " =1+1": "' =1+1",
        "\uff1d1+1": "'\uff1d1+1",
        "\t@SUM(A1)": "'\t'@SUM(A1)",
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
