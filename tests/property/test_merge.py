"""Merges in any order between uploads of any shape: every answer equals the model's, and every entry is there once.

A plan is also a partition of the files that it merges. Pieces of any size have the same entries in the same order.
"""

import tempfile
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.merging import BASE_MS, HOUR_MS, HOUR_S, Merging, RegionItem
from tiered_index.format.shard import entry_checksum
from tiered_index.service.jobs import merge_plan as plan
from tiered_index.service.jobs import rewrite as task_module
from tiered_index.service.jobs.rewrite import InputReader
from tiered_index.service.read.cold_path import ColdPath

KINDS = {"native": {}, "rocketmq": {"preset": "rocketmq"}, "extended": {"item_type": RegionItem}}
ROW = st.tuples(st.integers(0, 60), st.integers(0, 3599), st.sampled_from("abc"))
STEP = st.one_of(
    st.tuples(st.just("publish"), st.lists(ROW, min_size=1, max_size=12)),
    st.tuples(st.just("hot"), st.tuples(st.integers(0, 60), st.integers(20, 60), st.integers(1, 400))),
    st.tuples(st.just("merge"), st.sampled_from([1, 2, 24, 720])),
)


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([1, 5, 64]),
    st.sampled_from([16, 1 << 20]),
    st.sampled_from([0, plan._HELD_BYTES]),
    st.lists(STEP, min_size=2, max_size=9),
)
def test_any_order_of_uploads_and_merges(
    kind: str, slots: int, piece: int, held: int, steps: list[tuple[str, Any]]
) -> None:
    before = task_module.PIECE_ITEMS, plan._HELD_BYTES
    task_module.PIECE_ITEMS, plan._HELD_BYTES = piece, held
    with tempfile.TemporaryDirectory() as folder:
        life = Merging(Path(folder), settings={"slots": slots}, **KINDS[kind])
        try:
            life.put([(BASE_MS, "a")])
            life.publish()
            life.later()
            for name, of in [*steps, ("merge", 24)]:
                if name == "merge":
                    life.merge(of * HOUR_S)
                    continue
                if name == "publish":
                    life.put([(BASE_MS + hour * HOUR_MS + second * 1000, key) for hour, second, key in of])
                else:
                    hour, count, gap_s = of
                    life.put([(BASE_MS + hour * HOUR_MS + number * gap_s * 1000, "hot") for number in range(count)])
                life.publish()
            life.check()
            assert sum(stored.count for stored in life.state.objects.values()) == life.messages
            assert not life.state.files
        finally:
            task_module.PIECE_ITEMS, plan._HELD_BYTES = before
            life.close()


@settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.integers(1, 300), st.integers(1, 8), st.sampled_from([1, 7, 64]), st.integers(0, 2**31))
def test_pieces_of_any_size_are_the_same_entries(most: int, step: int, slots: int, seed: int) -> None:
    """Entries are in order of base slots, none twice, none missing. A small size gives several pieces."""
    rng = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as folder:
        life = Merging(Path(folder), settings={"slots": slots})
        try:
            for _ in range(3):
                rows = zip(rng.integers(0, 90_000, 70).tolist(), rng.integers(0, 40, 70).tolist(), strict=True)
                life.put([(BASE_MS + second * 1000, f"k{min(key, 25)}") for second, key in rows])
                life.publish()
            life.later()
            life.merge(HOUR_S, end_s=BASE_MS // 1000 + 50_000)
            sources, schema = list(life.state.objects.values()), life.state.genesis.layout.schema
            cold = ColdPath(life.storage, keyed=True)
            low = slots // 3 // step * step
            for first, last in ((0, slots), (low, slots)):
                reader = InputReader(cold, sources, schema, slots, first, last, step, ExitStack())
                pieces = list(reader.pieces(most))
                bounds = [(piece.low, piece.high) for piece in pieces if piece.part in (None, 0)]
                assert all(high <= next_low for (_, high), (next_low, _) in pairwise(bounds))
                for piece in pieces:
                    base = piece.items["key_hash"].astype(np.int64) % slots
                    assert ((base >= piece.low) & (base < piece.high)).all() and piece.low % step == 0
                whole = InputReader(cold, sources, schema, slots, first, last, step, ExitStack()).pieces(1 << 30)
                together = [(len(piece.items), entry_checksum(piece.items, piece.seconds)) for piece in whole]
                apart = [(len(piece.items), entry_checksum(piece.items, piece.seconds)) for piece in pieces]
                assert sum(n for n, _ in apart) == sum(n for n, _ in together) == sum(reader.read_counts.values())
                assert sum(total for _, total in apart) % 2**64 == sum(total for _, total in together) % 2**64
                if (first, last) == (0, slots):
                    assert sum(n for n, _ in apart) == life.messages
                    assert len(apart) > 1 or life.messages <= 4 * most
            cold.close()
        finally:
            life.close()
