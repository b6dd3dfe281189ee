"""A terminal shows services, readers and answers. Answers become tables. A lookup has positional fields."""

import pytest

from tiered_index import Lookup
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.types import to_pandas

T = 1_700_000_000_000
TOPIC = "<b>orders & more</b>"


@pytest.fixture
def filled(index):
    for offset in range(30):
        index.put(TOPIC, 0, ["k", f"k{offset % 2}"], offset, 5, T + 1000 * offset)
    index.put("u", 0, "k", 1, 5, T)
    return index


def test_pairs_take_a_count_and_lookups_have_their_own(filled):
    lookups = [(TOPIC, "k"), (TOPIC, "k1"), Lookup(TOPIC, "k", max_count=2)]
    assert filled.query_many(lookups, max_count=3).counts.tolist() == [3, 3, 2]
    assert filled.query_many(lookups[:2], max_count=20).counts.tolist() == [20, 15]
    assert filled.query_many(lookups[:1]).counts.tolist() == [30]
    for wrong in (0, "5", None):
        with pytest.raises(InvalidArgument, match="max_count"):
            filled.query_many(lookups[:2], max_count=wrong)


def test_a_batch_is_one_table(filled):
    cursor = filled.query(TOPIC, "k", max_count=28).cursor
    for more in ([], [Lookup(TOPIC, "k", cursor=cursor)]):
        results = filled.query_many([("u", "k"), ("u", "none"), (TOPIC, "k1"), *more])
        table = results.to_arrow()
        rows = [{"lookup": at, **row} for at, result in enumerate(results) for row in result.to_arrow().to_pylist()]
        assert table.to_pylist() == rows and len(rows) > 15
        assert results.to_pandas()["lookup"].tolist() == table["lookup"].to_pylist()
        assert table.schema.names == ["lookup", *results[0].to_arrow().schema.names]
    for none in ([], [("u", "none")]):
        assert filled.query_many(none).to_arrow().schema == table.schema


def test_a_frame_without_pandas_names_the_extra():
    class Table:
        def to_pandas(self):
            raise ModuleNotFoundError("No module named 'pandas'")

    with pytest.raises(ConfigError, match=r"needs pandas: pip install .*\[pandas\]"):
        to_pandas(Table())
