"""Entries that answers lack by the logs of their indexes: those of lost objects, and hidden ones.

Threads: immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tiered_index.format.keys.hashing import HASH_RULES, HashRule
from tiered_index.service.log.expired import Expired
from tiered_index.service.log.records import LostObject
from tiered_index.service.read.answers.batch import LookupBatch
from tiered_index.service.read.answers.replaced_rows import ReplacedRows
from tiered_index.types import Freshness, Provenance

Unexpired = dict[HashRule, list[LookupBatch]]
"""The lookups by hash rule, if the index has expired entries."""


class Logs(NamedTuple):
    """Lost objects and expired entries by the logs of indexes, with the URI of each index (None: only one index)."""

    lost: Sequence[tuple[str | None, LostObject]] = ()
    expired: Sequence[tuple[str | None, Expired]] = ()

    @classmethod
    def of(cls, indexes: Iterable[tuple[str | None, Mapping[str, LostObject], Expired]]) -> Logs:
        """Make it from the URI, the lost objects and the expired entries of each index."""
        lacking = [index for index in indexes if index[1] or index[2]]
        if not lacking:
            return _NOTHING
        lost = [(source, index) for source, given_up, _ in lacking for index in given_up.values()]
        return cls(lost, [(source, gone) for source, _, gone in lacking if gone])

    @classmethod
    def joined(cls, parts: Sequence[Logs]) -> Logs:
        """Join the lost objects and expired entries of several indexes."""
        return cls([item for part in parts for item in part.lost], [item for part in parts for item in part.expired])

    def unexpired(self, batch: LookupBatch, replaced_rows: ReplacedRows) -> Unexpired:
        """Return lookups without the hidden entries of the only index. `replaced_rows` gets the replaced ones."""
        if not self.expired:
            return {}
        [(_, gone)] = self.expired
        # for all rules, because an object that replaces a removed one may have another rule
        return {
            rule: [under_rule.without(gone, replaced_rows) for under_rule in batch.under(rule)] for rule in HASH_RULES
        }

    def provenance(
        self,
        freshness: tuple[Freshness, ...],
        unknown_topics: tuple[str, ...],
        topic: str | None,
        second_min: int,
        second_max: int,
        *hashes: int,
        key: str | None = None,
        replaced: int = 0,
    ) -> Provenance:
        """Return the provenance of an answer for inclusive epoch seconds, with its number of `replaced` rows.

        It is for `topic` and `key` with its hashes, or for all topics (None) and keys (None, and no hashes).
        """
        if not self.lost and not self.expired:
            return Provenance(freshness, unknown_topics)
        bounds = second_min, second_max, *hashes
        lost = [lost.lost_file(source) for source, lost in self.lost if lost.concerns(*bounds, topic=topic, key=key)]
        times = [expired.latest_ms if topic is None else expired.before_ms(topic) for _, expired in self.expired]
        # the latest of several indexes; 0 means that nothing has expired, because entries may be older than the epoch
        expired_before_ms = max([ms for ms in times if ms and ms // 1000 > second_min], default=None)
        return Provenance(freshness, unknown_topics, tuple(lost), expired_before_ms, replaced)


_NOTHING = Logs()
