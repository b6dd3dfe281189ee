"""Entries that answers lack by the logs of their indexes: those of lost objects, and hidden ones.

Threads: immutable.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tiered_index.service.log.expired import Expired
from tiered_index.service.log.hidden import HiddenTable
from tiered_index.service.log.records import LostObject
from tiered_index.types import Freshness, Provenance


class Logs(NamedTuple):
    """Lost objects and expired entries by the logs of indexes, with the URI of each index (None: only one index)."""

    lost: Sequence[tuple[str | None, LostObject]] = ()
    expired: Sequence[tuple[str | None, Expired]] = ()

    @classmethod
    def of(cls, indexes: Iterable[tuple[str | None, Mapping[str, LostObject], Expired]]) -> Logs:
        """Make it from the URI, the lost objects and the expired entries of each index."""
        lacking = [index for index in indexes if index[1] or index[2].hidden is not None]
        if not lacking:
            return NO_LOGS
        lost = [(source, index) for source, given_up, _ in lacking for index in given_up.values()]
        return cls(lost, [(source, gone) for source, _, gone in lacking if gone.hidden is not None])

    @classmethod
    def joined(cls, parts: Sequence[Logs]) -> Logs:
        """Join the lost objects and expired entries of several indexes."""
        return cls([item for part in parts for item in part.lost], [item for part in parts for item in part.expired])

    def of_source(self, source: str) -> Logs:
        """Return the logs of the only index as those of one of several, by its URI."""
        return self._replace(
            lost=[(source, lost) for _, lost in self.lost], expired=[(source, expired) for _, expired in self.expired]
        )

    @property
    def hidden(self) -> HiddenTable | None:
        """The hidden entries of the only index by topic; None: none is hidden."""
        if not self.expired:
            return None
        [(_, expired)] = self.expired
        return expired.hidden

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


NO_LOGS = Logs()
