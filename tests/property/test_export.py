"""Export and import: for any entries in any states, the copy has the same entries, each as often, and gives equal
answers.
"""

import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.merging import BASE_MS, HOUR_MS, HOUR_S, Merging, RegionItem
from tiered_index import Lookup
from tiered_index.service.read.lookups import Lookups

KINDS = {"native": {}, "rocketmq": {"preset": "rocketmq"}, "extended": {"item_type": RegionItem}}
ROW = st.tuples(st.integers(0, 60 * 3600 - 1), st.sampled_from(["a", "b", "\u00e9", "\U0001f600"]))
STEP = st.one_of(
    st.tuples(st.just("put"), st.lists(ROW, min_size=1, max_size=12)),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.just("publish"), st.none()),
    st.tuples(st.just("merge"), st.sampled_from([1, 24])),
)
BOUND = st.one_of(st.none(), st.integers(0, 60 * HOUR_MS))


def exported(index: Lookups, *arguments: Any) -> tuple[pa.Table, int]:
    with index.export(*arguments) as export:
        return pa.Table.from_batches(list(export), export.schema), export.checksum


def counted(rows: Iterable[dict[str, Any]]) -> Counter[Any]:
    return Counter(tuple(sorted((name, value) for name, value in row.items() if name != "topic_id")) for row in rows)


def rows(table: pa.Table) -> Counter[Any]:
    return counted(table.to_pylist())


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.sampled_from(sorted(KINDS)), st.lists(STEP, min_size=1, max_size=8), st.tuples(BOUND, BOUND))
def test_a_copy_is_equal(kind: str, steps: list[tuple[str, Any]], bounds: tuple[int | None, int | None]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        life = Merging(Path(folder) / "one", settings={"items": 20}, **KINDS[kind])
        copy = Merging(Path(folder) / "two", settings={"items": 50}, **KINDS[kind])
        try:
            life.put([(BASE_MS, "a")])
            for number, (name, of) in enumerate(steps):
                if name == "put":
                    topic = "t" if number % 2 else "other"
                    life.put([(BASE_MS + second * 1000, key) for second, key in of], topic)
                elif name == "merge":
                    life.publish()
                    life.merge(of * HOUR_S)
                else:
                    life.index.flush() if name == "flush" else life.publish()
            life.later()
            table, checksum = exported(life.index)
            assert len(table) == life.messages
            for batch in table.to_batches(max_chunksize=7):
                copy.index.put_batch(batch)
            copy.publish()
            assert exported(copy.index)[1] == checksum
            assert rows(exported(copy.index)[0]) == rows(table)
            lookups = [Lookup(topic=topic, key=key, max_count=10_000) for topic, key in sorted(life.questions)]
            for answer, answer_of_copy in zip(
                life.index.query_many(lookups), copy.index.query_many(lookups), strict=True
            ):
                assert life.answers(answer) == life.answers(answer_of_copy)
            with life.reader() as reader:
                published, _ = exported(reader)
                assert rows(published) <= rows(table)
            life.publish()
            with life.reader() as reader:
                published, of_published = exported(reader)
                assert rows(published) == rows(table) and of_published == checksum
            begin, end = (None if bound is None else BASE_MS + bound for bound in bounds)
            if begin is not None and end is not None:
                begin, end = min(begin, end), max(begin, end)
            part, _ = exported(life.index, "t", begin, end)
            first, last = (begin or 0) // 1000, (2**60 if end is None else end) // 1000
            within = [row for row in table.to_pylist() if first <= row["timestamp_ms"] // 1000 <= last]
            assert rows(part) == counted(row for row in within if row["topic"] == "t")
        finally:
            life.close()
            copy.close()
