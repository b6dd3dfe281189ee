"""The plan of a build: the tables, shards and pieces. Pure.

A window is a table. Its base slots are cut into shards, and shards into pieces, which are numbered through all tables.
One sort has one piece; a shard has consecutive pieces, a Spark partition consecutive shards. Windows are aligned to the
epoch, UTC. A second outside the plausible range is in a *quarantine window* of 2**31 seconds, which no merge reads.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from tiered_index.errors import InvalidArgument
from tiered_index.format.layout import SlotMap, divided
from tiered_index.service.jobs.rewriting.rewrite import Window
from tiered_index.service.log.records import QUARANTINE_S, IndexDescriptor, Origin
from tiered_index.service.write.owned import SourceQueues
from tiered_index.service.write.validation import TopicTable
from tiered_index.spark.writing.census import Census, WindowScale, too_many_windows

# Expected entries of a piece. A piece of more than twice as many (it has a hot key) is written in parts by time.
PIECE_ITEMS = 1 << 19
_SHARD_BYTES = 256 << 20
# Least size of a shard if shards are made smaller for parallel work.
_LEAST_BYTES = 32 << 20
# Added to the begins of quarantine windows, so that their codes follow all others.
_BEHIND = 1 << 40
Int64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class TablePlan:
    """One table: `pieces` from number `first_piece` on, of `width` base slots each, `pieces_a_shard` to a shard."""

    window: Window
    quarantined: bool
    first_piece: int
    pieces: int
    width: int
    pieces_a_shard: int

    @property
    def shards(self) -> int:
        """Number of shards, without the further parts of pieces with a hot key."""
        return -(-self.pieces // self.pieces_a_shard)

    def base_slots(self, first: int, pieces: int) -> tuple[int, int]:
        """Return the half-open range of base slots of `pieces` pieces, the first with number `first` in this table."""
        base = self.window.slots.base
        return min(base, first * self.width), min(base, (first + pieces) * self.width)


@dataclass(frozen=True)
class BuildPlan:
    """All tables, quarantine windows last, each kind by time; `topics` are (id, name), `sequence` is that of shards.

    `queues` are those that entries from outside may not use; None: the entries are those of a source.
    """

    genesis: IndexDescriptor
    scale: WindowScale
    tables: tuple[TablePlan, ...]
    topics: tuple[tuple[int, str], ...]
    sequence: int
    partition_of_piece: npt.NDArray[np.int32]
    piece_items: int
    queues: SourceQueues | None = None

    @property
    def partitions(self) -> int:
        """Number of Spark partitions that write."""
        return int(self.partition_of_piece[-1]) + 1

    @property
    def shards(self) -> int:
        """Number of shards, without the further parts of pieces with a hot key."""
        return sum(table.shards for table in self.tables)

    @property
    def entries(self) -> int:
        """Number of entries of all tables."""
        return sum(table.window.entries for table in self.tables)

    @cached_property
    def _firsts(self) -> Int64:
        return np.array([table.first_piece for table in self.tables], np.int64)

    @cached_property
    def _codes(self) -> Int64:
        """An ascending number for each table: its start, quarantine windows after all others."""
        return np.array([table.window.begin_s + table.quarantined * _BEHIND for table in self.tables], np.int64)

    def table_of(self, piece: int) -> int:
        """Return the index of a piece's table."""
        return int(np.searchsorted(self._firsts, piece, "right")) - 1

    def pieces_of(self, seconds: Int64, hashes: npt.NDArray[np.int32]) -> tuple[Int64, Int64]:
        """Return pieces and starts of windows (i64, n each). Raises `InvalidArgument` for an unplanned window."""
        begins, wrong = self.scale.begins(seconds)
        codes = begins + wrong * _BEHIND
        index = np.minimum(np.searchsorted(self._codes, codes), len(self._codes) - 1)
        if not (self._codes[index] == codes).all():
            raise InvalidArgument("the source changed while it was read: it has windows that were not counted")
        widths = np.array([table.width for table in self.tables], np.int64)
        width = widths[0] if (widths == widths[0]).all() else widths[index]
        _, slots = divided(hashes, self.genesis.layout.slots)
        return self._firsts[index] + slots // width, begins


def plan_build(
    census: Census,
    genesis: IndexDescriptor,
    scale: WindowScale,
    shards: int | str,
    parallelism: int,
    *,
    sequence: int,
    max_windows: int,
    origin: Origin = "build",
    queues: SourceQueues | None = None,
) -> BuildPlan:
    """Return the plan of a build, or of another `origin`; `queues` are those of `BuildPlan`.

    Raises `InvalidArgument` for too many windows.
    """
    if len(census.windows) > max_windows:
        raise InvalidArgument(too_many_windows(f"{len(census.windows):,}", scale, f", and {max_windows:,} are allowed"))
    base, item_size = genesis.layout.slots, genesis.layout.schema.item.itemsize
    aim = max(_LEAST_BYTES, min(_SHARD_BYTES, census.entries * item_size // max(1, 2 * parallelism)))
    tables: list[TablePlan] = []
    loads: list[int] = []
    first = 0
    for (wrong, begin), count in sorted(census.windows.items()):
        slots = SlotMap.for_count(base, count)
        window = Window(secrets.token_hex(8), begin, QUARANTINE_S if wrong else scale.window_s, slots, count, origin)
        wanted = -(-count * item_size // aim) if shards == "auto" else int(shards)
        a_shard = max(1, -(-count // (wanted * PIECE_ITEMS)))
        # a piece ends at a slot boundary of every slot map
        width = max(1, -(-base // (wanted * a_shard * slots.join))) * slots.join
        table = TablePlan(window, wrong, first, -(-base // width), width, a_shard)
        tables.append(table)
        loads += [count // table.shards] * table.shards
        first += table.pieces
    partitions = _partitions(tables, loads, aim // item_size)
    # the source's ids, then those assigned, in order of name
    topics = TopicTable()
    named_by_source = sorted((topic_id, name) for topic_id, name in census.topics if topic_id is not None)
    topics.give(named_by_source)
    others = sorted(name for topic_id, name in census.topics if topic_id is None)
    named = tuple(dict.fromkeys((*named_by_source, *((topics.assign(name), name) for name in others))))
    return BuildPlan(genesis, scale, tuple(tables), named, sequence, partitions, PIECE_ITEMS, queues)


def _partitions(tables: Sequence[TablePlan], loads: Sequence[int], most: int) -> npt.NDArray[np.int32]:
    """Return the partition (i32) of each piece: neighbouring small shards share one, up to about `most` entries."""
    of_shard: list[int] = []
    number, held = 0, 0
    for load in loads:
        if held and held + load > most:
            number, held = number + 1, 0
        of_shard.append(number)
        held += max(1, load)
    # the last shard of a table may have fewer pieces
    pieces = [min(t.pieces_a_shard, t.pieces - first) for t in tables for first in range(0, t.pieces, t.pieces_a_shard)]
    return np.repeat(np.array(of_shard, np.int32), pieces)
