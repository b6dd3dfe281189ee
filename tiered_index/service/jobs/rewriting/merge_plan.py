"""Plans merges and rewrites from the log's state alone: inputs, windows, tasks. Pure.

Inputs are whole objects: the log record that removes an input adds all its entries in tables of their windows. Files
that share a window belong to one rewrite. A window that has a table gets a second, small table; a
later merge joins both. A rewrite never mixes entries of builds and of writers, so that a build
replaces only entries of builds. A task is a run of base slots and a group of neighbouring windows. Its memory: two
parts of an upload for each window that it writes, and 8 bytes per entry. `Bounds` has the bounds of a writer's merges,
which are smaller.
"""

from __future__ import annotations

import itertools
import re
import secrets
from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter

from msgspec import structs

from tiered_index.base.units import UNITS_S
from tiered_index.errors import CorruptFile, InvalidArgument
from tiered_index.format.keys.hashing import joint_rule
from tiered_index.format.layout import SlotMap
from tiered_index.service.jobs.rewriting.job import Rewrite
from tiered_index.service.jobs.rewriting.rewrite import READERS, RewriteTask, Window
from tiered_index.service.log.records import QUARANTINE_S, Origin, StoredObject
from tiered_index.service.log.state import LogState

# memory for the streams of a task; if all windows need less, their number has no limit
_HELD_BYTES = 256 << 20
# if a byte of the inputs is read more often than this, on average, the slots are split into more runs
_MOST_READ = 1.5
# the smallest shard, on average, that such a split may make
_LEAST_BYTES = 4 << 20
_LENGTH = re.compile(r"([0-9]{1,9})\s*([smhd]?)")
_LONGEST_S = 100 * 366 * 86400 // 2

Span = tuple[int, int, int]
"""First and last window of an input, and its bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of rewrites and tasks. The defaults are those of the commands; `MergeWorker.bounds` are a writer's.

    - `entries`: most entries of a rewrite that begins in one window; None: any. Windows with more are left. A rewrite
      of several windows with more is cut between windows.
    - `directory_bytes`: most bytes of the directories of a rewrite's inputs. More of a window make several tables.
    - `full_windows`: windows of a task whose shards may have their full size.
    - `windows`: most windows of a task. Their streams hold at most 8 MiB each, 384 MiB together, even with wrong
      estimates.
    - `held_bytes`: memory for the streams of a task.
    - `leaves_builds`: only entries of live writers are merged.
    - `piece_items`, `readers`: see `RewriteTask`.
    """

    entries: int | None = None
    directory_bytes: int = 1 << 62
    full_windows: int = 8
    windows: int = 48
    held_bytes: int | None = None
    leaves_builds: bool = False
    piece_items: int | None = None
    readers: int = READERS


_COMMAND = Bounds()


def window_seconds(window: str | int) -> int:
    """Return the seconds of ``90s``, ``15m``, ``1h``, ``1d`` or of a plain number. Raises `InvalidArgument`."""
    matched = _LENGTH.fullmatch(str(window).strip().lower())
    seconds = int(matched[1]) * UNITS_S[matched[2] or "s"] if matched else 0
    if not 1 <= seconds <= _LONGEST_S:
        raise InvalidArgument(f"a window is like 1h, 1d, 7d or a number of seconds up to 50 years, not {window!r}")
    return seconds


def cut_windows(
    sizes: Mapping[int, int], spans: Sequence[Span], shard_bytes: int, most_runs: int, bounds: Bounds = _COMMAND
) -> tuple[int, list[list[int]]]:
    """Return the number of runs of slots (at most `most_runs`) and the groups of windows; `sizes`: bytes per window."""
    runs = min(most_runs, -(-max(sizes.values()) // shard_bytes))
    groups = _groups(sizes, runs, shard_bytes, bounds)
    least = len(sizes) * _LEAST_BYTES
    while _read(groups, spans) > _MOST_READ and 2 * runs <= most_runs and sum(sizes.values()) >= 2 * runs * least:
        runs *= 2
        groups = _groups(sizes, runs, shard_bytes, bounds)
    return runs, groups


def _groups(sizes: Mapping[int, int], runs: int, shard_bytes: int, bounds: Bounds) -> list[list[int]]:
    held_bytes = _HELD_BYTES if bounds.held_bytes is None else bounds.held_bytes
    if sum(sizes.values()) <= runs * held_bytes:
        return [sorted(sizes)]
    groups: list[list[int]] = []
    held = 0
    for number, size in sorted(sizes.items()):
        held += size // runs
        most = shard_bytes if groups and len(groups[-1]) < bounds.full_windows else min(shard_bytes, held_bytes)
        if not groups or held > most or len(groups[-1]) == bounds.windows:
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
# about this many entries of a rewrite are in one slot of its coarsest window
_STEP_ENTRIES = 1 << 17
# as `SlotMap.for_count` chooses
_ENTRIES_PER_SLOT = 4
NOT_OVER, OF_A_BUILD = "its window is not over yet", "a build may replace it"
USUAL = (NOT_OVER, OF_A_BUILD)
"""The usual reasons why objects are left."""


@dataclass(frozen=True, slots=True)
class MergeRewrite(Rewrite):
    """A rewrite into tables of `windows`."""

    tasks: tuple[RewriteTask, ...]
    windows: tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class MergePlan:
    """Rewrites that can run in any order; `left` are the objects that stay, as (name, reason) pairs.

    `too_large` are the windows with more entries than the bounds allow, as (begin in epoch seconds, entries) pairs.
    `begins` has the first windows of all rewrites, in epoch seconds, also of those that wait.
    """

    rewrites: tuple[MergeRewrite, ...]
    left: tuple[tuple[str, str], ...] = ()
    too_large: tuple[tuple[int, int], ...] = ()
    begins: tuple[int, ...] = ()


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


def plan_merge(
    state: LogState,
    options: MergeOptions,
    *,
    now_s: int,
    lost: Container[str] = (),
    bounds: Bounds = _COMMAND,
    waits: Container[int] = (),
    most: int | None = None,
) -> MergePlan:
    """Return the plan of a merge without the objects named in `lost`. Raises `InvalidArgument`.

    It has at most `most` rewrites (None: all), and none of a first window in `waits` (begins in epoch seconds).
    """
    window_s = options.window_s
    chosen, left = _chosen(state, options, now_s, lost, bounds)
    components, too_large = _cut(_components(chosen, window_s), window_s, bounds)
    begins = [_interval(component[0])[0] // window_s * window_s for component in components]
    ready = [component for begin, component in zip(begins, components, strict=True) if begin not in waits][:most]
    present = _present(state, window_s, lost) if ready else {}
    rewrites = [_merge_of(state, component, present, options, bounds) for component in ready]
    return MergePlan(tuple(rewrites), tuple(left), tuple(too_large), tuple(begins))


def _chosen(
    state: LogState, options: MergeOptions, now_s: int, lost: Container[str], bounds: Bounds
) -> tuple[list[list[StoredObject]], list[tuple[str, str]]]:
    """Return the files and tables to merge, each as its objects, and the others, each with the reason."""
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
        if bounds.leaves_builds and objects[0].origin != "writer":
            left.append((name, OF_A_BUILD))
        elif any(stored.name in lost for stored in objects):
            left.append((name, "the storage lacks one of its objects"))
        elif last - first >= _MAX_WINDOWS:
            left.append((name, f"its entries span {last - first + 1:,} windows"))
        elif (last + 1) * window_s > now_s - min_age_s:
            left.append((name, NOT_OVER))
        else:
            chosen.append(objects)
    return chosen, left


_Present = Mapping[tuple[Origin, int], list[list[StoredObject]]]


def _present(state: LogState, window_s: int, lost: Container[str]) -> _Present:
    """Return the tables of the length `window_s`, by their origin and begin."""
    present: dict[tuple[Origin, int], list[list[StoredObject]]] = {}
    for shards in state.tables.values():
        if shards[0].part.window_s == window_s and not any(stored.name in lost for stored in shards):
            present.setdefault((shards[0].origin, shards[0].part.begin_s), []).append(shards)
    return present


def _merge_of(
    state: LogState, component: Sequence[list[StoredObject]], present: _Present, options: MergeOptions, bounds: Bounds
) -> MergeRewrite:
    """Return the rewrite of `component`, and of those tables of its windows that are small enough."""
    window_s = options.window_s
    inputs = [stored for objects in component for stored in objects]
    counts = _estimates(inputs, window_s)
    room = 1 << 62 if bounds.entries is None else bounds.entries - sum(stored.count for stored in inputs)
    for begin, count in list(counts.items()):
        tables = present.get((inputs[0].origin, begin * window_s), [])
        held = sum(stored.count for shards in tables for stored in shards)
        if tables and (held <= _FOLD_RATIO * count or len(tables) >= _MAX_TABLES):
            # of more tables than the bounds allow, the smallest ones
            for size, shards in sorted(
                ((sum(s.count for s in shards), shards) for shards in tables), key=itemgetter(0)
            ):
                if size <= room:
                    inputs += shards
                    counts[begin] += size
                    room -= size
    return _rewrite(state, inputs, counts, window_s, bounds, options.shard_bytes)


def _cut(
    components: Sequence[list[list[StoredObject]]], window_s: int, bounds: Bounds
) -> tuple[list[list[list[StoredObject]]], list[tuple[int, int]]]:
    """Return the components, those above the bounds cut, and the windows that are too large, each with its entries.

    A part has the files and tables of one first window. Those that reach into later windows make a small table there.
    """
    parts: list[list[list[StoredObject]]] = []
    too_large: list[tuple[int, int]] = []
    for component in components:
        if _fits(component, bounds):
            parts.append(component)
            continue
        for number, same in itertools.groupby(component, lambda objects: _interval(objects)[0] // window_s):
            window = list(same)
            entries = _entries(window)
            if bounds.entries is not None and entries > bounds.entries:
                too_large.append((number * window_s, entries))
            else:
                parts += _by_directories(window, bounds.directory_bytes)
    return parts, too_large


def _fits(component: Sequence[Sequence[StoredObject]], bounds: Bounds) -> bool:
    entries, directories = _entries(component), sum(map(_directory_bytes, component))
    return (bounds.entries is None or entries <= bounds.entries) and directories <= bounds.directory_bytes


def _by_directories(window: Iterable[list[StoredObject]], most_bytes: int) -> list[list[list[StoredObject]]]:
    """Return files and tables in parts whose directories have at most `most_bytes`, unless a single one has more."""
    parts: list[list[list[StoredObject]]] = []
    held = 0
    for objects in window:
        held += _directory_bytes(objects)
        if not parts or held > most_bytes:
            parts.append([])
            held = _directory_bytes(objects)
        parts[-1].append(objects)
    return parts


def _entries(groups: Iterable[Sequence[StoredObject]]) -> int:
    return sum(stored.count for objects in groups for stored in objects)


def _directory_bytes(objects: Iterable[StoredObject]) -> int:
    return sum(stored.directory_length + stored.metadata_length for stored in objects)


def plan_rewrite(
    state: LogState, names: Container[str], *, lost: Container[str] = (), shard_bytes: int = 1 << 30
) -> list[MergeRewrite]:
    """Return rewrites that write the objects `names` again, without expired and erased entries.

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
    rewrites = []
    for window_s, groups in sorted(lengths.items()):
        for component in _components(groups, window_s):
            inputs = [stored for objects in component for stored in objects]
            counts = _estimates(inputs, window_s)
            rewrites.append(_rewrite(state, inputs, counts, window_s, _COMMAND, shard_bytes))
    return rewrites


def _rewrite(
    state: LogState,
    inputs: Sequence[StoredObject],
    counts: dict[int, int],
    window_s: int,
    bounds: Bounds,
    shard_bytes: int,
) -> MergeRewrite:
    assert state.genesis is not None
    # entries keep their hashes, since their keys are unknown: files of both rules make a table of both rules
    layout = structs.replace(state.genesis.layout, hash=joint_rule(stored.hash for stored in inputs))
    descriptor = structs.replace(state.genesis, layout=layout)
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
    runs, groups = cut_windows(sizes, spans, shard_bytes, units, bounds)
    cuts = sorted({min(base, units * number // runs * step) for number in range(runs)} | {base})
    ordered = tuple(sorted(inputs, key=lambda stored: stored.name))
    sequence = max(stored.sequence for stored in ordered)
    by_begin = {window.begin_s: window for window in windows}
    tasks: list[RewriteTask] = []
    for group in groups:
        mine = tuple(by_begin[begin * window_s] for begin in group)
        begin_s, end_s = group[0] * window_s, (group[-1] + 1) * window_s
        inside = [stored for stored in ordered if stored.second_min < end_s and stored.second_max >= begin_s]
        # each task reads the directories of its inputs: of a large table only those of the shards that it needs
        for (low, high), has in zip(itertools.pairwise(cuts), _by_range(inside, cuts), strict=True):
            limits = bounds.piece_items, bounds.readers
            of_task = len(tasks), low, high, sequence, tuple(has), mine, descriptor, state.expired.for_good
            tasks.append(RewriteTask(*of_task, *limits))
    return MergeRewrite("merge", "a merge", ordered, tuple(tasks), windows)


def _by_range(objects: Iterable[StoredObject], cuts: Sequence[int]) -> list[list[StoredObject]]:
    """Return the objects that may have entries of the base slots from each cut to the next, in their order."""
    in_ranges: list[list[StoredObject]] = [[] for _ in cuts[1:]]
    # for each slot map, the first slot of each range and the end of its slots
    bounds: dict[SlotMap, tuple[list[int], list[int]]] = {}
    for stored in objects:
        if (shard := stored.shard) is None:
            first, end = 0, len(in_ranges)
        else:
            if shard.slots not in bounds:
                slots = [shard.slots.slots_of_base(*part) for part in itertools.pairwise(cuts)]
                bounds[shard.slots] = [low for low, _ in slots], [high for _, high in slots]
            lows, highs = bounds[shard.slots]
            first, end = bisect_right(highs, shard.slot_low), bisect_left(lows, shard.slot_high)
        for has in in_ranges[first:end]:
            has.append(stored)
    return in_ranges


def _components(groups: Sequence[list[StoredObject]], window_s: int) -> list[list[list[StoredObject]]]:
    """Return the groups, joined if they have one origin and share windows, in order of time."""
    components: list[list[list[StoredObject]]] = []
    # the last component of each origin, and its last window
    latest: dict[Origin, tuple[list[list[StoredObject]], int]] = {}
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
