"""`query_many` left out answers that `query` gave, if a chain of an unsealed file pointed forward.

No verified file has such a chain. `query_many` took the place where it stopped for the chain's end.
"""

from __future__ import annotations

import pytest

from tiered_index import Lookup

NOW_MS = 1_700_000_000_000
KEYS = [f"k{number}" for number in range(8)]
PREVIOUS_BYTES = 4


def offsets(result):
    assert result.status == "complete"
    return [item.offset for item in result]


# the presets differ only in the size of an entry
@pytest.mark.parametrize(("preset", "nth"), [("rocketmq", 3), ("native", 1), ("native", 3), ("native", 4)])
@pytest.mark.parametrize("previous", [39, 40, 41, 999, 2**31 - 1, -1, -(2**31), "itself"])
def test_both_kinds_of_lookup_scan_a_broken_chain(open_index, preset, previous, nth):
    service = open_index(preset=preset, slots=4)
    for number in range(40):
        service.put("t", 0, KEYS[number % 8], number, 1, NOW_MS)
    service.flush()
    (file,) = service.files()
    entry = 8 * nth + 1  # of k0; entries count from 1
    wrong = entry if previous == "itself" else previous
    place = file.layout.entry_position(entry + 1) - PREVIOUS_BYTES
    with file.path.open("r+b") as stream:
        stream.seek(place)
        stream.write(wrong.to_bytes(PREVIOUS_BYTES, "big", signed=True))
    lookups = [Lookup(topic="t", key=key) for key in KEYS]
    together = service.query_many(lookups)
    for number, (key, lookup) in enumerate(zip(KEYS, lookups, strict=True)):
        wanted = list(range(32 + number, -1, -8))
        assert offsets(service.query("t", key)) == wanted
        assert offsets(together[number]) == wanted
        assert offsets(service.query_many([lookup])[0]) == wanted
