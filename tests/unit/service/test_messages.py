"""`messages` fetches messages: it drops and counts collisions, and reads further pages in their place.

No entry of the index is lost on the way.
"""

from dataclasses import dataclass

import pytest

from tiered_index import Fetched, IndexService
from tiered_index.errors import PartialAnswer, StorageMisconfigured, StorageUnavailable

T = 1_700_000_000_000


@dataclass(frozen=True)
class Text:
    """A message of no particular system."""

    text: str

    def to_dict(self, body="text", max_body_bytes=0):
        return {"text": self.text}


class Library:
    """Return messages by offset.

    Messages of `others` have another key. Those of `states` are not available. `errors` has an error for an offset.
    """

    def __init__(self, others=(), states=None, errors=None):
        self.others = set(others)
        self.states = states or {}
        self.errors = errors or {}
        self.calls = []

    def fetch(self, items, topic, key):
        self.calls.append([item.offset for item in items])
        return [self._one(item, key) for item in items]

    def _one(self, item, key):
        if item.offset in self.errors:
            error, place = self.errors[item.offset], f"place {item.offset % 2}"
            return Fetched(item=item, state="missing", problem=str(error), error=error, read_from=place, requests=1)
        if item.offset in self.states:
            return Fetched(item=item, state=self.states[item.offset], problem="why")
        carries, text = item.offset not in self.others, Text(f"{key} {item.offset}")
        return Fetched(item=item, state="local", message=text, carries_key=carries, requests=2, bytes=10)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """An index with entries at offsets 0 to 299 under one key. The newest has the greatest offset."""
    root = tmp_path_factory.mktemp("filled")
    with IndexService.open(root=root, storage="memory://messages", slots=7, items=500, background=False) as index:
        for number in range(300):
            index.put("t", 0, "k", number, 5, T + 1000 * (number // 3))
        yield index


def offsets(answer):
    return [fetched.item.offset for fetched in answer.messages]


def test_messages_come_in_the_order_of_the_index(filled):
    library = Library()
    answer = filled.messages("t", "k", max_count=10, source=library)
    assert offsets(answer) == [item.offset for item in filled.query("t", "k", max_count=10)]
    assert [fetched.message for fetched in answer.messages] == [Text(f"k {number}") for number in range(299, 289, -1)]
    assert (answer.status, len(answer), answer.collisions, answer.failed) == ("truncated", 10, 0, ())
    assert (answer.message_requests, answer.message_bytes) == (20, 100)
    assert answer.explain.requests == 20
    assert answer.explain.cost_usd > 0
    assert library.calls == [list(range(299, 289, -1))]
    rest = filled.messages("t", "k", max_count=1000, cursor=answer.cursor, source=library)
    assert offsets(rest) == list(range(289, -1, -1))
    assert (rest.status, rest.cursor) == ("complete", None)


@pytest.mark.parametrize("max_count", [1, 7, 150, 299])
@pytest.mark.parametrize("step", [2, 50, 1000])
def test_collisions_are_dropped_counted_and_paged_past(filled, max_count, step):
    """Also if nothing else is there."""
    wanted = [number for number in range(299, -1, -1) if number % step == 1 and step < 1000]
    shown, dropped, cursor = [], 0, None
    library = Library(set(range(300)) - set(wanted))
    for page in range(1000):
        answer = filled.messages("t", "k", max_count=max_count, cursor=cursor, source=library)
        shown += offsets(answer)
        dropped += answer.collisions
        cursor = answer.cursor
        if cursor is None:
            break
        assert answer.status == "truncated"
        # a page is full if there are enough messages
        assert len(answer) == max_count
        assert shown == wanted[: max_count * (page + 1)]
    assert (answer.status, shown, dropped) == ("complete", wanted, 300 - len(wanted))


def test_an_unavailable_message_is_listed_with_its_state(filled):
    library = Library(others=[298], states={299: "missing", 297: "expired"})
    answer = filled.messages("t", "k", max_count=3, source=library)
    states = {f.item.offset: (f.state, f.message is None) for f in answer.messages}
    assert list(states.items()) == [(299, ("missing", True)), (297, ("expired", True)), (296, ("local", False))]
    document = answer.to_dict()
    first = {"state": "missing", "item": answer.messages[0].item.to_dict(), "message": None, "problem": "why"}
    assert document["messages"][0] == first | {"read_from": None}
    assert document["messages"][2]["message"] == {"text": "k 296"}
    assert (document["collisions"], document["status"]) == (1, "truncated")
    assert document["explain"]["message_requests"] == answer.message_requests == 4


def test_a_place_that_cannot_be_asked_is_an_error_or_named(filled):
    down = StorageUnavailable("down")
    with pytest.raises(StorageUnavailable, match="down"):
        filled.messages("t", "k", source=Library(errors={290: down, 291: down}))
    with pytest.raises(PartialAnswer, match="denied") as raised:
        filled.messages("t", "k", source=Library(errors={290: down, 291: StorageMisconfigured("denied")}))
    assert {report.file for report in raised.value.failed} == {"place 0", "place 1"}
    library = Library(errors={298: down, 290: down})
    answer = filled.messages("t", "k", max_count=20, allow_partial=True, source=library)
    assert (offsets(answer), answer.status) == (list(range(299, 279, -1)), "partial")
    (report,) = answer.failed
    assert (report.file, report.outcome, report.error) == ("place 0", "failed", "down")
    assert (report.begin_ms, report.end_ms) == (T + 96_000, T + 99_000)
    rest = filled.messages("t", "k", max_count=20, cursor=answer.cursor, source=Library())
    assert offsets(rest) == list(range(279, 259, -1))
