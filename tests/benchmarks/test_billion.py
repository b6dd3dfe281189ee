"""The benchmark of a year: its oracle finds every kind of wrong answer, and a small disk is refused."""

from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.benchmarks import command
from tests.benchmarks.billion import oracle
from tests.benchmarks.billion.data import KEYS_FILE, SOURCE
from tests.integration.cli.command_lines import run_here

_HOT, _RARE, _ABSENT = "hot", "rare", "absent"


def _message(key: str, number: int) -> dict[str, object]:
    return {"topic": "t", "queue_id": 0, "key": key, "offset": number, "size": 9, "timestamp_ms": number * 1000 + 7}


def _answers() -> list[dict[str, object]]:
    """Return the right answers: the newest 64 of the hot key, the one of the rare key, none of the absent key."""
    rows = [_message(_HOT, 99 - place) | {"position": place, "status": "truncated"} for place in range(64)]
    rows.append(_message(_RARE, 500) | {"position": 0, "status": "complete"})
    none = dict.fromkeys(("queue_id", "offset", "size", "timestamp_ms", "position"))
    return [*rows, {"topic": "t", "key": _ABSENT, "status": "complete", **none}]


@pytest.fixture
def year(tmp_path):
    """A source with a hot and a rare key, and its keys."""
    messages = (
        [_message(_HOT, number) for number in range(100)]
        + [_message(_HOT, 36) | {"offset": 360}]
        + [_message(_RARE, 500), _message("other", 501)]
    )
    for name, rows in ((SOURCE, messages), (KEYS_FILE, [{"topic": "t", "key": k} for k in (_HOT, _RARE, _ABSENT)])):
        (tmp_path / name).mkdir()
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / name / "part-0.parquet")
    oracle.find(tmp_path)
    return tmp_path


def _check(year, answers):
    place = year / "answers"
    place.mkdir()
    pq.write_table(pa.Table.from_pylist(answers), place / "part-0.parquet")
    return oracle.check(year, place)


def test_right_answers_are_counted(year):
    assert oracle.hottest(year) == ("t", _HOT, 101)
    assert _check(year, _answers()) == {"keys_checked": 3, "entries_checked": 65}


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        (lambda rows: rows[:-1], "1 keys without an answer"),
        (lambda rows: [rows[0] | {"status": "partial"}, *rows[1:]], "1 answers that are not complete"),
        (lambda rows: [rows[0] | {"size": 10}, *rows[1:]], "1 entries of no message"),
        (lambda rows: [*rows[:-2], rows[-2], rows[-2] | {"position": 1}, rows[-1]], "1 entries twice in an answer"),
        (lambda rows: [row for row in rows if row["position"] != 5], "1 answers with too few"),
        (lambda rows: [rows[0] | _message(_HOT, 3), *rows[1:]], "1 answers with too few or too many entries, or older"),
        (
            lambda rows: [*rows[:5], rows[5] | _message(_HOT, 36) | {"offset": 360}, *rows[6:]],
            "1 answers with too few or too many",
        ),
        (lambda rows: [rows[0] | {"status": "complete"}, *rows[1:]], "1 complete answers of keys with more"),
        (
            lambda rows: [*rows[:64], rows[64] | {"status": "truncated"}, rows[65]],
            "1 truncated answers of keys with fewer",
        ),
        (lambda rows: [rows[-1] | _message(_ABSENT, 3) | {"position": 0}, *rows[:-1]], "1 entries of no message"),
    ],
)
def test_a_wrong_answer_ends_the_run(year, wrong, problem):
    with pytest.raises(RuntimeError, match=problem):
        _check(year, wrong(_answers()))


@pytest.mark.slow
def test_every_step_of_a_small_year_runs_and_its_answers_are_right(tmp_path):
    out = tmp_path / "year.json"
    options = ("--entries", 100_000, "--root-dir", tmp_path / "work", "--out", out, "--json")
    done = run_here("billion", *options, program=command.main, timeout=1800)
    assert done.code == 0, done
    (steps,) = json.loads(out.read_text())["sizes"].values()
    assert steps["million keys"]["keys_checked"] == steps["million keys, one process's index"]["keys_checked"]
    assert steps["erase a key"]["erased_entries"] > 100
    assert list((tmp_path / "work").iterdir()) == []


def test_a_disk_that_is_too_small_is_refused(tmp_path):
    done = run_here("billion", "--entries", 10**13, "--root-dir", tmp_path, "--json", program=command.main)
    assert done.error["type"] == "DiskFull"
    assert "10,000,000,000,000 messages need" in done.error["message"]
    assert list(tmp_path.iterdir()) == []
