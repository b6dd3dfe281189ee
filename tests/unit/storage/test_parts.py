"""Rules for parts that no server is asked about."""

from __future__ import annotations

import pytest

from tiered_index.errors import InvalidArgument
from tiered_index.storage.base import PartInfo, check_parts


def test_parts_come_back_in_order_of_number() -> None:
    parts = [PartInfo(n, str(n), 10) for n in (30, 1, 2)]
    assert [part.number for part in check_parts("a", parts, 10)] == [1, 2, 30]
    assert check_parts("a", [PartInfo(1, "x", 0)], 10) == [PartInfo(1, "x", 0)]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([], "no parts"),
        ([PartInfo(1, "x", 10), PartInfo(1, "y", 10)], "twice"),
        ([PartInfo(2, "x", 1), PartInfo(1, "y", 9)], "part 1 .* 9 bytes"),
        ([PartInfo(0, "x", 10)], "10,000"),
        ([PartInfo(10_001, "x", 10)], "10,000"),
    ],
)
def test_wrong_parts_are_refused_without_a_request(parts: list[PartInfo], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        check_parts("a", parts, 10)
