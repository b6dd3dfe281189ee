"""A sample of the changes that compare the compiled core with NumPy, and the defects that they have found."""

from tests.reliability import core_mutations
from tests.reliability.core_mutations import KINDS, run
from tests.support.core import compiled_core
from tiered_index.base import kernels


def test_a_sample_of_every_kind():
    tally = run(compiled_core(), dict.fromkeys(KINDS, 200), first=10**9)
    assert not tally.failures, "\n".join(tally.failures)
    # the campaign compares rows, not only errors
    assert all(tally.tried[f"with rows, of {kind}"] for kind in KINDS), tally.tried


def test_a_wrong_answer_is_noticed(monkeypatch):
    monkeypatch.setattr(core_mutations, "first_rows", lambda rows, *_: rows[: len(rows) if using_core() else 0])
    assert run(compiled_core(), {"rocketmq": 100}).by_kind["wrong"]


def using_core() -> bool:
    return kernels.compiled() is not None
