"""The oracle of the chaos campaign detects entries that are missing, were never put, or are out of order.

(The campaign: `tests/real_s3`.)
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.reliability.chaos_oracle import KEYS, QUEUES, Declared, Gone, Journal, batch, problem_with, seconds
from tests.support.model import OrderKey
from tiered_index import IndexItem, IndexService

LAST = 6000
KEY = 5
TOPIC = "a"


@pytest.fixture(scope="module")
def items(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[IndexItem]]:
    folder = tmp_path_factory.mktemp("index")
    with IndexService.open(
        root=folder / "root", storage=f"file://{folder}/store", slots=101, items=10_000, background=False
    ) as index:
        index.put_batch(batch(TOPIC, 0, LAST))
        yield list(index.query(TOPIC, f"key-{KEY}", max_count=10**6))


def place(item: IndexItem) -> OrderKey:
    return (item.timestamp_ms // 1000, item.offset, item.queue_id, ())


def kind(items: list[IndexItem], durable: int = LAST, offered: int = LAST, **more: object) -> str | None:
    problem = problem_with(items, TOPIC, KEY, durable, offered, **more)  # type: ignore[arg-type]
    return problem and problem[0]


def test_right_answers_have_no_problem_and_wrong_ones_have(items: list[IndexItem]) -> None:
    assert len(items) == len(range(KEY, LAST + 1, KEYS))
    tenth, before = place(items[9]), items[0].timestamp_ms // 1000 - 1
    for answer, expected, how in (
        (items, None, {}),
        (items, None, {"durable": 100}),
        (items[:10], None, {"truncated": True}),
        (items[10:], None, {"after": tenth}),
        ([], None, {"truncated": True}),
        *((items[:at] + items[at + 1 :], "lost", {}) for at in range(len(items))),
        (items[:4] + items[5:10], "lost", {"truncated": True}),
        (items[:10], "lost", {}),
        (items[10:], "lost", {"after": place(items[8])}),
        ([], "lost", {}),
        (items, "wrong", {"durable": 100, "offered": LAST - KEYS}),
        (items, "wrong", {"end_s": before}),
        ([*items, items[-1]], "wrong", {}),
        ([items[1], items[0], *items[2:]], "wrong", {}),
        (items[9:], "wrong", {"after": tenth}),
    ):
        assert kind(answer, **how) == expected, (len(answer), how)
    assert problem_with(items, TOPIC, KEY + 1, -1, LAST) and problem_with(items, "b", KEY, -1, LAST)


@pytest.mark.parametrize("what", [{}, {"key": KEY}, {"queue": 1}, {"key": KEY + 1}], ids=str)
def test_erased_entries_may_be_missing_and_later_must_be(items: list[IndexItem], tmp_path: Path, what: dict) -> None:
    gone = Gone(tmp_path / "journal")
    before_s = sorted(item.timestamp_ms // 1000 for item in items)[len(items) // 2]
    gone.ask(TOPIC, before_s, **what)
    gone.look()
    numbers = np.array([item.offset for item in items])
    hidden = (seconds(numbers) < before_s) & (numbers % KEYS == what.get("key", KEY))
    hidden &= numbers % QUEUES == what["queue"] if "queue" in what else True
    left = [item for item, is_hidden in zip(items, hidden.tolist(), strict=True) if not is_hidden]
    assert kind(items, gone=gone, log_number=9) is kind(left, gone=gone, log_number=9) is None
    assert kind(left[1:], gone=gone) == "lost"
    gone.state(TOPIC, before_s, 7, **what)
    gone.look()
    assert kind(items, gone=gone, log_number=6) is kind(left, gone=gone, log_number=7) is None
    assert (kind(items, gone=gone, log_number=7) == "wrong") == (len(left) < len(items))


def test_a_journal_gives_only_whole_lines(tmp_path: Path) -> None:
    declared, journal = Declared(tmp_path / "journal"), Journal(tmp_path / "journal")
    journal.offer(0, 9)
    journal.declare(4)
    declared.look()
    assert (declared.durable, declared.offered, declared.puts) == (4, 9, 10)
    for part, offered in (("o 5 19", 9), ("\n", 19)):
        with (tmp_path / "journal").open("a") as file:
            file.write(part)
        declared.look()
        assert declared.offered == offered
    journal.declare(3)
    declared.look()
    assert (declared.durable, declared.offered, declared.puts) == (4, 19, 25)
