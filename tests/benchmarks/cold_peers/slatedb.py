"""SlateDB by its own Python binding: an entry is a row with the entry's key as prefix, newest first.

The settings are those that its documentation advises: default settings, and blocks compressed by zstd. After the load,
everything is compacted into one sorted run. A reader follows the manifest without a checkpoint of its own. Its cache
holds filters, indexes and statistics of tables, but no blocks of data, so that data stays cold. A scan for a hot key
reads ahead.
"""

import asyncio
import contextlib
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_AT_ONCE = 32
# both numbers are subtracted from the greatest, so that the rest of the row's key sorts newest first
_REST = struct.Struct(">IQI")
_VALUE = struct.Struct(">II")
_SECOND, _OFFSET = (1 << 32) - 1, (1 << 64) - 1
_ROWS = 10_000
_META_BYTES, _DATA_BYTES = 128 << 20, 1
_AHEAD_BYTES = 16 << 10
_SETTLED_S = 900
_SOON_MS = 100


class Reader:
    """A `DbReader`."""

    def __init__(self, place: dict[str, str], follow: bool = False) -> None:
        from slatedb import uniffi as slate

        self._slate = slate
        self._loop = asyncio.new_event_loop()
        self._all = slate.KeyRange(start=None, start_inclusive=False, end=None, end_inclusive=False)
        self._one = self._options(1, 1)
        self._ahead = self._options(_AHEAD_BYTES, 4)
        self._db = self._loop.run_until_complete(self._open(place, follow))

    async def _open(self, place: dict[str, str], follow: bool) -> Any:
        slate = self._slate
        builder = slate.DbReaderBuilder(place["prefix"], _store(place))
        builder.with_reader_mode(slate.ReaderMode.FOLLOW_LATEST())
        builder.with_options(
            slate.ReaderOptions(
                manifest_poll_interval_ms=_SOON_MS if follow else 3_600_000,
                checkpoint_lifetime_ms=7_300_000,
                max_memtable_bytes=64 << 20,
                skip_wal_replay=not follow,
            )
        )
        caches = [
            slate.DbCache.new_moka_cache(
                slate.MokaCacheOptions(max_capacity=size, time_to_live=None, time_to_idle=None)
            )
            for size in (_DATA_BYTES, _META_BYTES)
        ]
        builder.with_db_cache(slate.DbCache.new_split_cache(*caches), 1)
        return await builder.build()

    def _options(self, ahead_bytes: int, tasks: int) -> Any:
        return self._slate.ScanOptions(
            durability_filter=self._slate.DurabilityLevel.MEMORY,
            dirty=False,
            read_ahead_bytes=ahead_bytes,
            cache_blocks=False,
            max_fetch_tasks=tasks,
        )

    async def _find(self, key: str, count: int, ahead: bool) -> list[list[int]]:
        prefix = key.encode() + b"\0"
        options = self._ahead if ahead else self._one
        rows = await self._db.scan_prefix_with_options(prefix, self._all, options)
        entries: list[list[int]] = []
        while len(entries) < count and (batch := await rows.next_batch(count - len(entries))):
            for row in batch:
                second, offset, queue = _REST.unpack(row.key[len(prefix) :])
                entries.append([_SECOND - second, _OFFSET - offset, queue])
        return entries

    def lookup(self, key: str, count: int) -> list[list[int]]:
        return self._loop.run_until_complete(self._find(key, count, False))

    def lookup_hot(self, key: str, count: int) -> list[list[int]]:
        return self._loop.run_until_complete(self._find(key, count, True))

    def lookup_many(self, keys: list[str]) -> list[list[list[int]]]:

        async def every() -> list[list[list[int]]]:
            free = asyncio.Semaphore(_AT_ONCE)

            async def look_up(key: str) -> list[list[int]]:
                async with free:
                    return await self._find(key, 64, False)

            return await asyncio.gather(*map(look_up, keys))

        return self._loop.run_until_complete(every())

    lookup_at_once = lookup_many

    def close(self) -> None:
        self._loop.run_until_complete(self._db.shutdown())


def build(place: dict[str, str], source: Path) -> list[str]:
    """Write all rows, flush, and compact into one sorted run; return the names of its tables."""
    return asyncio.run(_load(place, source))


async def _load(place: dict[str, str], source: Path) -> list[str]:
    import pyarrow as pa
    from slatedb import uniffi as slate

    builder = slate.DbBuilder(place["prefix"], _store(place))
    settings = slate.Settings.default()
    settings.set("compression_codec", '"Zstd"')
    settings.set("compactor_options.poll_interval", '"200ms"')
    settings.set("compactor_options.worker.compactions_poll_interval", '"200ms"')
    builder.with_settings(settings)
    db = await builder.build()
    options = slate.WriteOptions()
    for path in sorted(source.iterdir()):
        with pa.ipc.open_file(path) as entries:
            batch = entries.get_batch(0)
        columns = (batch[name].to_pylist() for name in ("key", "timestamp_ms", "offset", "queue_id", "size"))
        rows = list(zip(*columns, strict=True))
        for first in range(0, len(rows), _ROWS):
            written = slate.WriteBatch()
            for key, time_ms, offset, queue, size in rows[first : first + _ROWS]:
                rest = _REST.pack(_SECOND - time_ms // 1000, _OFFSET - offset, queue)
                written.put(key.encode() + b"\0" + rest, _VALUE.pack(size, 0))
            await db.write_with_options(written, options)
    await db.flush_with_options(slate.FlushOptions(flush_type=slate.FlushType.MEM_TABLE))
    admin = slate.AdminBuilder(place["prefix"], _store(place)).build()
    end_s = time.monotonic() + _SETTLED_S
    submitted = None
    while True:
        manifest = await admin.read_manifest(None)
        if not manifest.l0 and len(manifest.compacted) == 1:
            break
        if time.monotonic() > end_s:
            raise TimeoutError(f"SlateDB has not compacted everything after {_SETTLED_S} s")
        running = submitted is not None and (await admin.read_compaction(submitted, None)).active
        if not running and not await _active(admin):
            views = [slate.SourceId.SST_VIEW(view.id) for view in manifest.l0]
            runs = [slate.SourceId.SORTED_RUN(run.id) for run in manifest.compacted]
            target = min((run.id for run in manifest.compacted), default=0)
            with contextlib.suppress(slate.Error):  # fails if the compactor began a compaction of its own first
                spec = slate.CompactionSpec.TIERED(segment=b"", sources=[*views, *runs], destination=target)
                submitted = (await admin.submit_compaction(spec)).id
        await asyncio.sleep(0.2)
    await db.shutdown()
    # the garbage collector does not always return through this binding, so only referenced objects count as stored
    views = [view for run in manifest.compacted for view in run.sst_views]
    return [f"compacted/{view.sst.id.value}.sst" for view in views]


async def _active(admin: Any) -> bool:
    state = await admin.read_compactions(None)
    return state is not None and any(each.active for each in state.recent_compactions)


@contextlib.contextmanager
def writer(place: dict[str, str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that puts an entry of a key, and returns when the entry is durable."""
    from slatedb import uniffi as slate

    loop = asyncio.new_event_loop()

    async def open_db() -> Any:
        return await slate.DbBuilder(place["prefix"], _store(place)).build()

    async def put(key: str) -> None:
        rest = _REST.pack(_SECOND - int(time.time()), _OFFSET, 0)
        handle = await db.put(key.encode() + b"\0" + rest, _VALUE.pack(1, 0))
        await handle.await_durable()

    db = loop.run_until_complete(open_db())
    yield lambda key: loop.run_until_complete(put(key))
    loop.run_until_complete(db.shutdown())


def _store(place: dict[str, str]) -> Any:
    from slatedb import uniffi as slate

    # endpoint, credentials and region come from the environment
    return slate.ObjectStore.resolve(f"s3://{place['bucket']}")
