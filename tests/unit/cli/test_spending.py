"""A command's limits decrease page by page. When they are used up, the entries found so far are the last page."""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from tiered_index.cli.paging import CommandBudget, Pages, Question
from tiered_index.errors import BudgetExceeded
from tiered_index.service.read.budget import LookupLimits
from tiered_index.storage.context import remaining_s
from tiered_index.types import Explain, Freshness, LostFile, Provenance, QueryResult

NOTHING = QueryResult(items=(), status="partial")


def answer(cursor: str | None, requests: int = 2, size_bytes: int = 100) -> QueryResult:
    return QueryResult(
        items=(),
        status="truncated" if cursor else "complete",
        cursor=cursor,
        explain=Explain(requests=requests, bytes=size_bytes),
    )


class Asked:
    """Return one answer after the other, or raise it if it is an error. Keep the arguments of each call."""

    def __init__(self, *answers: QueryResult | BudgetExceeded) -> None:
        self.answers = list(answers)
        self.calls: list[dict[str, Any]] = []

    def __call__(self, **lookup: Any) -> QueryResult:
        self.calls.append(lookup)
        given = self.answers.pop(0)
        if isinstance(given, BudgetExceeded):
            raise given
        return given


class Opened(Question[QueryResult]):
    """A lookup that is `look_up`, and the time that was left when it was opened."""

    nothing = NOTHING

    def __init__(self, look_up: Callable[..., QueryResult]) -> None:
        super().__init__(ExitStack())
        self.look_up = look_up
        self.left_s: list[float | None] = []

    def open(self) -> Callable[..., QueryResult]:
        self.left_s.append(remaining_s())
        return self.look_up


def pages(look_up: Callable[..., QueryResult], budget: CommandBudget, *, every: bool = True) -> Pages[QueryResult]:
    return Pages(Opened(look_up), "begin", budget, every=every)


def test_each_page_gets_the_rest_of_the_limits() -> None:
    costs = answer("b", requests=0, size_bytes=0), answer("c", requests=9, size_bytes=1000)
    look_up = Asked(answer("a"), *costs, answer(None))
    found = list(pages(look_up, CommandBudget(LookupLimits(5, 150, None))))
    assert [page.cursor for page in found] == ["a", "b", "c", None]
    left = [("begin", 5, 150), ("a", 3, 50), ("b", 3, 50), ("c", 0, 0)]
    assert [(call["cursor"], call["max_requests"], call["max_bytes"]) for call in look_up.calls] == left
    assert {call["timeout_s"] for call in look_up.calls} == {None}


def test_the_entries_so_far_are_the_last_page_before_the_error() -> None:
    found = QueryResult(items=(), status="partial", explain=Explain(requests=1))
    error = BudgetExceeded("max_requests=3 reached", result=found)
    asked = pages(Asked(answer("a"), error, answer(None)), CommandBudget(LookupLimits(3, None, None)))
    assert list(asked) == [answer("a"), found]
    assert asked.error() == {"error": {"type": "BudgetExceeded", "message": "max_requests=3 reached", "exit_code": 6}}
    with pytest.raises(BudgetExceeded) as raised:
        asked.settle()
    assert raised.value is error


@pytest.mark.parametrize("result", [None, "of another kind"])
def test_an_error_that_carries_no_answer_is_an_empty_one(result: object) -> None:
    exceeded = BudgetExceeded("timeout_s was reached", result=result)
    asked = pages(Asked(exceeded), CommandBudget(LookupLimits(None, None, 5)))
    assert list(asked) == [NOTHING]
    assert asked.exceeded is not None


def test_the_time_covers_the_opening_and_never_becomes_none() -> None:
    look_up = Asked(answer("a"), answer(None))
    budget = CommandBudget(LookupLimits(None, None, 1e-9))
    opened = Opened(look_up)
    assert len(list(Pages(opened, None, budget, every=True))) == 2
    (left_s,) = opened.left_s
    assert left_s is not None
    assert left_s <= 0
    assert remaining_s() is None
    assert [call["timeout_s"] for call in look_up.calls] == [1e-6, 1e-6]


def fresh(cursor: str | None, as_of_ms: int, not_asked: str | None = None) -> QueryResult:
    known = Freshness(source="s3://b/i", as_of_ms=as_of_ms, positions={}, not_asked=not_asked)
    return replace(answer(cursor), seen=Provenance((known,)))


def test_pages_together_are_as_old_as_the_first_one() -> None:
    asked = pages(Asked(fresh("a", 1_700_000_000_000), fresh(None, 1_700_000_009_000)), CommandBudget(LookupLimits()))
    assert len(list(asked)) == 2
    assert asked.seen()["as_of_ms"] == 1_700_000_000_000
    assert asked.as_of() == " as of 2023-11-14T22:13:20Z"


def test_pages_together_lack_everything_that_one_of_them_lacks() -> None:
    gone = LostFile(file="f", begin_ms=1_700_000_000_000, end_ms=1_700_000_001_000, entries=5)
    lacking = replace(answer("a"), seen=Provenance(lost=(gone,)))
    asked = pages(Asked(lacking, answer(None)), CommandBudget(LookupLimits()))
    assert len(list(asked)) == 2
    assert asked.totals(0)["lost"] == [gone.to_dict()]
    assert "except" in asked.conclusion


@pytest.mark.parametrize("away_at", [0, 1])
def test_pages_say_that_the_storage_was_not_asked_for_one_of_them(away_at: int) -> None:
    both = [answer("a"), answer(None)]
    both[away_at] = fresh(both[away_at].cursor, 1_700_000_000_000, "no answer")
    asked = pages(Asked(*both), CommandBudget(LookupLimits()))
    assert len(list(asked)) == 2
    assert asked.seen()["freshness"][0]["not_asked"] == "no answer"
    assert asked.as_of() == " as far as the root knows (the storage as of 2023-11-14T22:13:20Z)"
