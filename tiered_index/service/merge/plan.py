"""Plans a merge from the log's state alone: inputs, windows, tasks. Pure.

Inputs are whole objects: the log record that removes an input adds all its entries in tables of their windows. Files
that share a window belong to one job. A window that has a table gets a second, small table; later a job merges both.
A job never mixes entries of builds, of writers and of unknown origin, so that a build replaces only entries of builds.
A task is a run of base slots and a group of neighbouring windows. Its memory: two parts of an upload for each window
that it writes, and 8 bytes per entry.
"""

from __future__ import annotations

import itertools
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.hashing import joint_rule
from tiered_index.format.slots import SlotMap
from tiered_index.retention import UNITS_S, Expired
from tiered_index.service.log.records import QUARANTINE_S, IndexDescriptor, Origin, StoredObject
from tiered_index.service.log.state import LogState

FULL_WINDOWS = 8
"""The uploads of a task with at most this many windows have parts of full size; more windows have smaller parts."""
# of a task: with the smallest parts (5 MiB) they need 480 MiB, even with wrong estimates
_MOST_WINDOWS = 48
# memory for the uploads of a task; if all windows need less, their number has no limit
_HELD_BYTES = FULL_WINDOWS * (32 << 20)
# if a byte of the inputs is read more often than this, on average, the slots are split into more runs
_MOST_READ = 1.5
# the smallest shard, on average, that such a split may make
_LEAST_BYTES = 4 << 20
_LENGTH = re.compile(r"([0-9]{1,9})\s*([smhd]?)")
_LONGEST_S = 100 * 366 * 86400 // 2

Span = tuple[int, int, int]
"""First and last window of an input, and its bytes."""


def window_seconds(window: str | int) -> int:
    """Return the seconds of ``90s``, ``15m``, ``1h``, ``1d`` or of a plain number. Raises `InvalidArgument`."""
    found = _LENGTH.fullmatch(str(window).strip().lower())
    seconds = int(found[1]) * UNITS_S[found[2] or "s"] if found else 0
    if not 1 <= seconds <= _LONGEST_S:
        raise InvalidArgument(f"a window is like 1h, 1d, 7d or a number of seconds up to 50 years, not {window!r}")
    return seconds


def cut_windows(
    sizes: Mapping[int, int], spans: Sequence[Span], shard_bytes: int, most_runs: int
) -> tuple[int, list[list[int]]]:
    """Return the number of runs of slots (at most `most_runs`) and the groups of windows; `sizes`: bytes per window."""
    runs = min(most_runs, -(-max(sizes.values()) // shard_bytes))
    groups = _groups(sizes, runs, shard_bytes)
    least = len(sizes) * _LEAST_BYTES
    while _read(groups, spans) > _MOST_READ and 2 * runs <= most_runs and sum(sizes.values()) >= 2 * runs * least:
        runs *= 2
        groups = _groups(sizes, runs, shard_bytes)
    return runs, groups


def _groups(sizes: Mapping[int, int], runs: int, shard_bytes: int) -> list[list[int]]:
    if sum(sizes.values()) <= runs * _HELD_BYTES:
        return [sorted(sizes)]
    groups: list[list[int]] = []
    held = 0
    for number, size in sorted(sizes.items()):
        held += size // runs
        most = shard_bytes if groups and len(groups[-1]) < FULL_WINDOWS else min(shard_bytes, _HELD_BYTES)
        if not groups or held > most or len(groups[-1]) == _MOST_WINDOWS:
            groups.append([])
            held = size // runs
        groups[-1].append(number)
    return groups


def _read(groups: Sequence[Sequence[int]], spans: Sequence[Span]) -> float:
    """Return how often a byte of the inputs is read, on average."""
    begins = [group[0] for group in groups]
    read = sum(
        size * (bisect_right(begins, last) - max(0, bisect_right(begins, first) - 1)) for first, last, size in spans
    )
    return read / max(1, sum(size for _, _, size in spans))


_DAY_S = 86400
# of one file; a file with more windows (a wrong clock) is not merged
_MAX_WINDOWS = 400
# a table is merged again if it has at most this many times the new entries
_FOLD_RATIO = 4
# of one window; more are merged, however large they are
_MAX_TABLES = 8
# about this many entries of a job are in one slot of its coarsest window
_STEP_ENTRIES = 1 << 17
# as `SlotMap.for_count` chooses
_ENTRIES_PER_SLOT = 4


@dataclass(frozen=True, slots=True)
class Window:
    """A table to write, for epoch seconds [`begin_s`, `begin_s` + `window_s`).

    `entries` is an estimate. `origin` is the origin of all its inputs.
    """

    table: str
    begin_s: int
    window_s: int
    slots: SlotMap
    entries: int
    origin: Origin | None


@dataclass(frozen=True, slots=True)
class MergeTask:
    """One part of a job: base slots [`base_low`, `base_high`) of a group of windows.

    `inputs` are the objects that may have such entries. The task writes one shard for each window with entries that
    have not `expired`. `sequence` is the greatest of the job's inputs.
    """

    number: int
    base_low: int
    base_high: int
    sequence: int
    inputs: tuple[StoredObject, ...]
    windows: tuple[Window, ...]
    descriptor: IndexDescriptor
    expired: Expired

    @property
    def seconds(self) -> tuple[int, int]:
        """The first and the last second of the windows."""
        return self.windows[0].begin_s, self.windows[-1].begin_s + self.windows[-1].window_s - 1


@dataclass(frozen=True, slots=True)
class MergeJob:
    """Inputs that one log record removes, and the windows that it adds."""

    inputs: tuple[StoredObject, ...]
    windows: tuple[Window, ...]
    tasks: tuple[MergeTask, ...]

    @property
    def entries(self) -> int:
        """Entries to read; those that have not expired are written."""
        return sum(stored.count for stored in self.inputs)

    @property
    def size_bytes(self) -> int:
        """Bytes of the inputs."""
        return sum(stored.size_bytes for stored in self.inputs)


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Jobs that can run in any order; `left` are the objects that stay, as (name, reason) pairs."""

    jobs: tuple[MergeJob, ...]
    left: tuple[tuple[str, str], ...] = field(default=())


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeOptions:
    """The options of a merge.

    - `window_s`: the length of a window in seconds. Windows are aligned to the epoch (UTC).
    - `min_age_s`: a window is merged once it ended this many seconds ago.
    - `shard_bytes`: the approximate size of a shard.
    - `begin_s`, `end_s`: only files and shorter tables with all seconds in [`begin_s`, `end_s`) are merged.
    - `skip_lost`: skip files and tables with missing objects, instead of raising `CorruptFile`.
    """

    window_s: int = 86400
    min_age_s: int = 3600
    shard_bytes: int = 1 << 30
    begin_s: int = 0
    end_s: int = 1 << 62
    skip_lost: bool = False


def plan_merge(state: LogState, options: MergeOptions, *, now_s: int, lost: Container[str] = ()) -> MergePlan:
    """Return the plan of a merge without the objects named in `lost`. Raises `InvalidArgument`."""
    window_s, shard_bytes, min_age_s = options.window_s, options.shard_bytes, options.min_age_s
    if window_s < 1 or shard_bytes < 1 << 20 or min_age_s < 0:
        raise InvalidArgument(
            f"window_s {window_s}, shard_bytes {shard_bytes}, min_age_s {min_age_s}: window_s must be at least 1, "
            f"shard_bytes at least {1 << 20}, min_age_s at least 0"
        )
    left: list[tuple[str, str]] = []
    groups = [([stored], stored.file_id) for stored in state.files.values()]
    groups += [(shards, table) for table, shards in state.tables.items() if shards[0].part.window_s < window_s]
    chosen: list[list[StoredObject]] = []
    for objects, name in groups:
        low, high = _interval(objects)
        first, last = low // window_s, high // window_s
        if low < options.begin_s or high >= options.end_s:
            continue
        if any(stored.name in lost for stored in objects):
            left.append((name, "the storage lacks one of its objects"))
        elif last - first >= _MAX_WINDOWS:
            left.append((name, f"its entries span {last - first + 1:,} windows"))
        elif (last + 1) * window_s > now_s - min_age_s:
            left.append((name, "its window is not over yet"))
        else:
            chosen.append(objects)
    present: dict[tuple[Origin | None, int], list[list[StoredObject]]] = {}
    for shards in state.tables.values():
        if shards[0].part.window_s == window_s and not any(stored.name in lost for stored in shards):
            present.setdefault((shards[0].origin, shards[0].part.begin_s), []).append(shards)
    jobs = []
    for component in _components(chosen, window_s):
        inputs = [stored for objects in component for stored in objects]
        counts = _estimates(inputs, window_s)
        for begin, count in list(counts.items()):
            tables = present.get((inputs[0].origin, begin * window_s), [])
            held = sum(stored.count for shards in tables for stored in shards)
            if tables and (held <= _FOLD_RATIO * count or len(tables) >= _MAX_TABLES):
                inputs += [stored for shards in tables for stored in shards]
                counts[begin] += held
        jobs.append(_job(state, inputs, counts, window_s, shard_bytes))
    return MergePlan(tuple(jobs), tuple(left))


def plan_rewrite(
    state: LogState, names: Container[str], *, lost: Container[str] = (), shard_bytes: int = 1 << 30
) -> MergePlan:
    """Return a plan that writes the objects `names` again, without expired and erased entries.

    Files become tables of one day each, or of longer windows if a file spans many days. Files of the quarantine become
    tables of `QUARANTINE_S`, since their times are implausible. Tables keep their windows. Files and tables with an
    object in `lost` are left out.
    """
    lengths: dict[int, list[list[StoredObject]]] = {}
    for stored in state.files.values():
        if stored.name in names and stored.name not in lost:
            days = (stored.second_max - stored.second_min) // _DAY_S + 2
            window_s = QUARANTINE_S if stored.lane == "quarantine" else _DAY_S * -(-days // _MAX_WINDOWS)
            lengths.setdefault(window_s, []).append([stored])
    for shards in state.tables.values():
        if any(stored.name in names for stored in shards) and not any(stored.name in lost for stored in shards):
            lengths.setdefault(shards[0].part.window_s, []).append(shards)
    jobs = []
    for window_s, groups in sorted(lengths.items()):
        for component in _components(groups, window_s):
            inputs = [stored for objects in component for stored in objects]
            counts = _estimates(inputs, window_s)
            jobs.append(_job(state, inputs, counts, window_s, shard_bytes))
    return MergePlan(tuple(jobs))


def _job(
    state: LogState, inputs: Sequence[StoredObject], counts: dict[int, int], window_s: int, shard_bytes: int
) -> MergeJob:
    assert state.genesis is not None
    # entries keep their hashes, since their keys are unknown: files of both rules make a table of both rules
    layout = replace(state.genesis.layout, hash=joint_rule(stored.hash for stored in inputs))
    descriptor = replace(state.genesis, layout=layout)
    base, item_size = layout.slots, layout.schema.item.itemsize
    # a piece has whole slots of every window: a slot of a small window must not have too many entries of a large one
    least = _ENTRIES_PER_SLOT * -(-sum(counts.values()) // _STEP_ENTRIES)
    origin = inputs[0].origin
    for stored in inputs:
        CorruptFile.unless_equal(stored.name, "its table has objects of two origins", origin, stored.origin)
    windows = tuple(
        Window(
            secrets.token_hex(8), begin * window_s, window_s, SlotMap.for_count(base, max(count, least)), count, origin
        )
        for begin, count in sorted(counts.items())
    )
    step = max(window.slots.join for window in windows)
    units = -(-base // step)
    sizes = {begin: count * item_size for begin, count in counts.items()}
    spans = [
        (stored.second_min // window_s, stored.second_max // window_s, stored.count * item_size) for stored in inputs
    ]
    runs, groups = cut_windows(sizes, spans, shard_bytes, units)
    cuts = sorted({min(base, units * number // runs * step) for number in range(runs)} | {base})
    ordered = tuple(sorted(inputs, key=lambda stored: stored.name))
    sequence = max(stored.sequence for stored in ordered)
    by_begin = {window.begin_s: window for window in windows}
    tasks: list[MergeTask] = []
    for group in groups:
        mine = tuple(by_begin[begin * window_s] for begin in group)
        begin_s, end_s = group[0] * window_s, (group[-1] + 1) * window_s
        inside = [stored for stored in ordered if stored.second_min < end_s and stored.second_max >= begin_s]
        # each task reads the directories of its inputs: of a large table only those of the shards that it needs
        for (low, high), has in zip(itertools.pairwise(cuts), _by_range(inside, cuts), strict=True):
            tasks.append(MergeTask(len(tasks), low, high, sequence, tuple(has), mine, descriptor, state.expired))
    return MergeJob(ordered, windows, tuple(tasks))


def _by_range(objects: Iterable[StoredObject], cuts: Sequence[int]) -> list[list[StoredObject]]:
    """Return the objects that may have entries of the base slots from each cut to the next, in their order."""
    found: list[list[StoredObject]] = [[] for _ in cuts[1:]]
    # for each slot map, the first slot of each range and the end of its slots
    bounds: dict[SlotMap, tuple[list[int], list[int]]] = {}
    for stored in objects:
        if (shard := stored.shard) is None:
            first, end = 0, len(found)
        else:
            if shard.slots not in bounds:
                slots = [shard.slots.slots_of_base(*part) for part in itertools.pairwise(cuts)]
                bounds[shard.slots] = [low for low, _ in slots], [high for _, high in slots]
            lows, highs = bounds[shard.slots]
            first, end = bisect_right(highs, shard.slot_low), bisect_left(lows, shard.slot_high)
        for has in found[first:end]:
            has.append(stored)
    return found


def _components(groups: Sequence[list[StoredObject]], window_s: int) -> list[list[list[StoredObject]]]:
    """Return the groups, joined if they have one origin and share windows, in order of time."""
    components: list[list[list[StoredObject]]] = []
    # the last component of each origin, and its last window
    latest: dict[Origin | None, tuple[list[list[StoredObject]], int]] = {}
    for objects in sorted(groups, key=_interval):
        low, high = _interval(objects)
        component, reached = latest.get(objects[0].origin, ([], -1))
        if low // window_s > reached:
            components.append(component := [])
        component.append(objects)
        latest[objects[0].origin] = component, max(reached, high // window_s)
    return components


def _estimates(inputs: Iterable[StoredObject], window_s: int) -> dict[int, int]:
    """Return an estimate of the entries per window, at least 1, as if each input's were spread evenly in time."""
    counts: dict[int, int] = {}
    for stored in inputs:
        first, last = stored.second_min // window_s, stored.second_max // window_s
        seconds = stored.second_max - stored.second_min + 1
        for number in range(first, last + 1):
            overlap = min(stored.second_max + 1, (number + 1) * window_s) - max(stored.second_min, number * window_s)
            counts[number] = counts.get(number, 0) + max(1, stored.count * overlap // seconds)
    return counts


def _interval(objects: Sequence[StoredObject]) -> tuple[int, int]:
    return min(stored.second_min for stored in objects), max(stored.second_max for stored in objects)
