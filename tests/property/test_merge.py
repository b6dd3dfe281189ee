"""Merges in any order between uploads of any shape: every answer equals the model's, every entry is there once, and a
copy made of an export is equal.
"""

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.merging import BASE_MS, HOUR_MS, HOUR_S, Merging, RegionItem
from tiered_index import Lookup
from tiered_index.service.jobs.rewriting import merge_plan as plan
from tiered_index.service.jobs.rewriting import rewrite as task_module
from tiered_index.service.read.lookups import Lookups

KINDS = {"native": {}, "rocketmq": {"preset": "rocketmq"}, "extended": {"item_type": RegionItem}}
ROW = st.tuples(st.integers(0, 60 * 3600 - 1), st.sampled_from(["a", "b", "\u00e9", "\U0001f600"]))
STEP = st.one_of(
    st.tuples(st.just("put"), st.lists(ROW, min_size=1, max_size=12)),
    st.tuples(st.just("hot"), st.tuples(st.integers(0, 60), st.integers(20, 60), st.integers(1, 400))),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.just("publish"), st.none()),
    st.tuples(st.just("merge"), st.sampled_from([1, 2, 24, 720])),
)
BOUND = st.one_of(st.none(), st.integers(0, 60 * HOUR_MS))


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([(1, 4000), (5, 20), (64, 4000)]),
    st.sampled_from([16, 1 << 20]),
    st.sampled_from([0, plan._HELD_BYTES]),
    st.lists(STEP, min_size=2, max_size=9),
    st.tuples(BOUND, BOUND),
)
def test_any_order_of_uploads_and_merges(
    kind: str,
    geometry: tuple[int, int],
    piece: int,
    held: int,
    steps: list[tuple[str, Any]],
    bounds: tuple[int | None, int | None],
) -> None:
    before = task_module.PIECE_ITEMS, plan._HELD_BYTES
    task_module.PIECE_ITEMS, plan._HELD_BYTES = piece, held
    with tempfile.TemporaryDirectory() as folder:
        layout = dict(zip(("slots", "items"), geometry, strict=True))
        life = Merging(Path(folder) / "one", settings=layout, **KINDS[kind])
        copy = Merging(Path(folder) / "two", settings={"items": 50}, **KINDS[kind])
        try:
            life.put([(BASE_MS, "a")])
            for number, (name, of) in enumerate(steps):
                if name == "put":
                    rows = [(BASE_MS + second * 1000, key) for second, key in of]
                    life.put(rows, "t" if number % 2 else "other")
                elif name == "hot":
                    hour, count, gap_s = of
                    life.put([(BASE_MS + hour * HOUR_MS + at * gap_s * 1000, "hot") for at in range(count)])
                elif name == "flush":
                    life.index.flush()
                else:
                    life.publish()
                    life.later()
                if name == "merge":
                    life.merge(of * HOUR_S)
            check_export(life, copy, *(None if bound is None else BASE_MS + bound for bound in bounds))
            life.merge(24 * HOUR_S)
            life.check()
            assert sum(stored.count for stored in life.state.objects.values()) == life.messages
            assert not life.state.files
        finally:
            task_module.PIECE_ITEMS, plan._HELD_BYTES = before
            life.close()
            copy.close()


def check_export(life: Merging, copy: Merging, begin: int | None, end: int | None) -> None:
    """Publish all entries. An export has each of them as often, before and after, and so has a copy made of it."""
    table, checksum = exported(life.index)
    assert len(table) == life.messages
    for batch in table.to_batches(max_chunksize=7):
        copy.index.put_batch(batch)
    copy.publish()
    assert exported(copy.index)[1] == checksum and counted(exported(copy.index)[0]) == counted(table)
    lookups = [Lookup(topic=topic, key=key, max_count=10_000) for topic, key in sorted(life.questions)]
    for answer, answer_of_copy in zip(life.index.query_many(lookups), copy.index.query_many(lookups), strict=True):
        assert life.answers(answer) == life.answers(answer_of_copy)
    with life.reader() as reader:
        assert counted(exported(reader)[0]) <= counted(table)
    life.later()
    life.publish()
    with life.reader() as reader:
        published, of_published = exported(reader)
        assert counted(published) == counted(table) and of_published == checksum
    if begin is not None and end is not None:
        begin, end = min(begin, end), max(begin, end)
    first, last = (begin or 0) // 1000, (2**60 if end is None else end) // 1000
    seconds = [time_ms // 1000 for time_ms in table["timestamp_ms"].to_pylist()]
    inside = [topic == "t" and first <= s <= last for topic, s in zip(table["topic"].to_pylist(), seconds, strict=True)]
    assert counted(exported(life.index, "t", begin, end)[0]) == counted(table.filter(pa.array(inside, pa.bool_())))


def exported(index: Lookups, *arguments: Any) -> tuple[pa.Table, int]:
    with index.export(*arguments) as export:
        return pa.Table.from_batches(list(export), export.schema), export.checksum


def counted(table: pa.Table) -> Counter[Any]:
    rows = table.to_pylist()
    return Counter(tuple(sorted((name, value) for name, value in row.items() if name != "topic_id")) for row in rows)
