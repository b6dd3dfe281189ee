"""Keys that a request of an erasure may have meant, if no stored entry has its own: other spellings that have entries.

The storage has hashes of keys, not keys. So a misspelt key can't be compared with stored ones; its likely spellings
are made and each is looked for. Pure, except for the `find` of the caller. Threads: any.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from msgspec.structs import replace

from tiered_index.format.schema import Schema
from tiered_index.service.jobs.erase_find import FindHidden, ScannedObject
from tiered_index.service.log.state import LogState
from tiered_index.storage.base import Storage
from tiered_index.tombstones import Tombstone, Tombstones
from tiered_index.types import MAX_TIMESTAMP_MS, no_progress

# Most spellings of a key, and most runs of entries that a search for them reads
_SPELLINGS, _RUNS = 200, 20_000
_QUOTED = re.compile(r"^[\"'#]+|[\"']+$")
_END_MS = MAX_TIMESTAMP_MS + 1


def spellings(key: str) -> Iterator[str]:
    """Yield other spellings of a key, the likeliest first: those of the console, then without one character or with
    two neighbours exchanged.
    """
    bare = _QUOTED.sub("", key.strip())
    written = (bare, re.sub(r"\s+", "", bare), re.sub(r"^0+(?=.)", "", bare))
    cases = (form for text in written for form in (text, text.lower(), text.upper()))
    shorter = (bare[:at] + bare[at + 1 :] for at in reversed(range(len(bare))))
    exchanged = (bare[:at] + bare[at + 1] + bare[at] + bare[at + 2 :] for at in range(len(bare) - 1))
    for text in dict.fromkeys([*cases, *shorter, *exchanged]):
        if text and text != key:
            yield text


def matched(stone: Tombstone, scanned: Iterable[ScannedObject]) -> bool:
    """Return whether an entry of the tombstone's key was found."""
    return any((number, stone.fingerprint) in scan.keys for scan in scanned for number in stone.hashes)


def near_keys(
    storage: Storage, state: LogState, topic: str, keys: Sequence[str], schema: Schema, find: FindHidden
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return which of `keys` have stored entries of some time, and which other spellings of them have.

    Raises the errors of `find`.
    """
    most = max(1, min(_SPELLINGS, _RUNS // max(1, len(state.objects) * len(keys))))
    tried = {
        text: Tombstone.of(topic, _END_MS, key=text, keyed=schema.keyed)
        for key in keys
        for text in [key, *list(spellings(key))[:most]]
    }
    scanned = find(storage, state.objects.values(), Tombstones(tuple(tried.values())), schema, no_progress).values()
    having = [text for text, stone in tried.items() if matched(stone, scanned)]
    return tuple([key for key in keys if key in having]), tuple([text for text in having if text not in keys])


def in_force(state: LogState, stone: Tombstone) -> bool:
    """Return whether the log states an erasure of the same entries already, before whatever time."""
    return any(known.covers(replace(stone, before_ms=-_END_MS)) for known in state.expired.tombstones)
