"""How often a lookup meets an entry of another key that looks like its own, without and with the 32-bit fingerprint.

Pure.

All keys of a file are hashed as entries are; then as many absent keys as a twentieth of them are looked up in the
sorted hashes. Equal fingerprints behind equal hashes are too rare to be met, so it is also counted how many of the
file's pairs of equal hash share the lowest eight bits of the fingerprint: one in 256 if the two hashes are independent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from tiered_index.cli.bench.messages import ABSENT, TOPIC, key_array
from tiered_index.cli.bench.table import Table
from tiered_index.format.hashing import code_units, hash_batch

__all__ = ["Matches", "count_matches", "fingerprint_table"]

_BATCH = 250_000
_SHARE = 20
_LOW_BITS = 8


@dataclass(frozen=True)
class Matches:
    """What `sample` lookups of absent keys met in a file of `keys` keys, and how its own pairs of equal hash
    compare.
    """

    keys: int
    sample: int
    equal_hash: int
    equal_both: int
    pairs: int
    pairs_low_bits: int

    @property
    def expected_hash(self) -> float:
        """Expected entries of equal hash a lookup: the hash has 31 bits."""
        return self.keys / 2**31

    @property
    def expected_both(self) -> float:
        """Expected entries a lookup of which the fingerprint is equal, too."""
        return self.keys / 2**63


def count_matches(keys: int) -> Matches:
    """Count in one file's worth of keys. Memory: 24 bytes a key."""
    hashes, marks = _hashed(0, keys)
    order = np.argsort(hashes, kind="stable")
    hashes, marks = hashes[order], marks[order]
    del order
    sample = max(1, keys // _SHARE)
    asked, asked_marks = _hashed(ABSENT, sample)
    first, last = np.searchsorted(hashes, asked, "left"), np.searchsorted(hashes, asked, "right")
    met = last - first
    places = np.repeat(first, met) + np.arange(int(met.sum())) - np.repeat(np.cumsum(met) - met, met)
    equal = np.flatnonzero(hashes[1:] == hashes[:-1])
    low = (1 << _LOW_BITS) - 1
    return Matches(
        keys=keys,
        sample=sample,
        equal_hash=len(places),
        equal_both=int(np.count_nonzero(marks[places] == np.repeat(asked_marks, met))),
        pairs=len(equal),
        pairs_low_bits=int(np.count_nonzero((marks[equal] ^ marks[equal + 1]) & low == 0)),
    )


def fingerprint_table(matches: Matches) -> Table:
    """Return what was counted beside what is expected."""
    files = 1_000
    return Table(
        title=f"false matches a lookup and file of {matches.keys:,} keys ({matches.sample:,} absent keys looked up)",
        columns=("entries of other keys", "met", "a lookup", "expected", f"in {files:,} files"),
        rows=(
            (
                "equal hash (RocketMQ's files)",
                matches.equal_hash,
                matches.equal_hash / matches.sample,
                matches.expected_hash,
                matches.expected_hash * files,
            ),
            (
                "equal hash and fingerprint (native files)",
                matches.equal_both,
                matches.equal_both / matches.sample,
                matches.expected_both,
                matches.expected_both * files,
            ),
            (
                f"pairs of equal hash with {_LOW_BITS} equal bits of fingerprint, of {matches.pairs:,}",
                matches.pairs_low_bits,
                None,
                matches.pairs / 2**_LOW_BITS,
                None,
            ),
        ),
    )


def _hashed(first: int, count: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    parts = []
    for start in range(first, first + count, _BATCH):
        numbers = np.arange(start, min(start + _BATCH, first + count))
        parts.append(hash_batch([TOPIC], np.zeros(len(numbers), np.int64), code_units(key_array(numbers))))
    return np.concatenate([hashes for hashes, _ in parts]), np.concatenate([marks for _, marks in parts])
