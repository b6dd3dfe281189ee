"""A sample of the changes that compare the compiled core with NumPy, and the defects that they have found."""

import pytest

from tests.reliability import core_mutations
from tests.reliability.core_mutations import KINDS, run
from tests.support.batches import batch
from tests.support.core import compiled_core, using
from tiered_index import IndexService, kernels


def test_a_sample_of_every_kind():
    tally = run(compiled_core(), dict.fromkeys(KINDS, 200), first=10**9)
    assert not tally.failures, "\n".join(tally.failures)
    # the campaign compares rows, not only errors
    assert all(tally.tried[f"with rows, of {kind}"] for kind in KINDS), tally.tried


def test_a_wrong_answer_is_noticed(monkeypatch):
    monkeypatch.setattr(core_mutations, "first_rows", lambda rows, *_: rows[: len(rows) if using_core() else 0])
    assert run(compiled_core(), {"plain": 100}).by_kind["wrong"]


def using_core() -> bool:
    return kernels.compiled() is not None


@pytest.mark.parametrize("core", [True, False])
def test_a_key_that_a_giant_slot_lacks(tmp_path, core):
    """A batch of lookups used to fail if a slot group in blocks had none of its keys."""
    settled = {"storage": "memory://giant", "slots": 1, "items": 20_000, "background": False}
    with using(compiled_core() if core else None), IndexService.open(root=tmp_path / "root", **settled) as index:
        count = 10_000
        times = range(1_700_000_000_000, 1_700_000_000_000 + count)
        index.put_batch(batch(count, key=[f"k{number}" for number in range(count)], timestamp_ms=times))
        index.seal()
        index.run_lifecycle()
        assert [len(answer) for answer in index.query_many([("t", "absent")])] == [0]
        assert [len(answer) for answer in index.query_many([("t", "absent"), ("t", "k5")])] == [0, 1]
