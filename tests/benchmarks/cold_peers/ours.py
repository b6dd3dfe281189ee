"""This index with its default settings: 240 files of three hours, and the tables merged from them.

Warm readers keep no slot groups (`cache_slot_groups=False`), so that data stays cold.
"""

import contextlib
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

TOPIC = "TopicOrder01"
# as docs/using.md advises, if other processes must read entries within 0.7 s
_SOON: dict[str, Any] = {"seal_after_s": 0.25, "checkpoint_every": 32}
_REFRESH_S = 0.1


class Reader:
    """An `IndexReader` on the storage alone."""

    def __init__(self, place: dict[str, str], warm: bool = False, follow: bool = False) -> None:
        # not at the top: the time of a new process includes its imports, and a build needs more of them
        from tiered_index import IndexReader

        settings: dict[str, Any] = {"cache_slot_groups": False, "refresh_interval_s": 3600.0} if warm else {}
        self._reader: Any = IndexReader.open(
            _uri(place), **(settings | ({"refresh_interval_s": _REFRESH_S} if follow else {}))
        )

    def lookup(self, key: str, count: int) -> list[list[int]]:
        result = self._reader.query(TOPIC, key, max_count=count)
        return [[item.timestamp_ms // 1000, item.offset, item.queue_id] for item in result]

    def lookup_many(self, keys: list[str]) -> list[list[list[int]]]:
        answers = self._reader.query_many([(TOPIC, key) for key in keys])
        starts, rows = answers.starts.tolist(), answers.rows
        columns = zip(*(rows[name].tolist() for name in ("second", "offset", "queue_id")), strict=True)
        every = [list(row) for row in columns]
        return [every[starts[at] : starts[at + 1]] for at in range(len(keys))]

    def close(self) -> None:
        self._reader.close()


def build(place: dict[str, str], source: Path, window: str | None = None) -> None:
    """Put, compact and upload each file of the source, or with `window` merge the uploaded files into its tables."""
    if window is not None:
        from tiered_index import merge
        from tiered_index.format.names import INDEX_SUFFIX
        from tiered_index.storage.opening import open_storage

        with contextlib.closing(open_storage(_uri(place))) as storage:
            merged = [each.name for each in storage.list() if each.name.endswith(INDEX_SUFFIX)]
            merge(_uri(place), window=window)
            # `tiered-index orphans --yes` does this a day later
            storage.delete_many(merged)
        return

    import pyarrow as pa

    from tiered_index import IndexService

    with (
        tempfile.TemporaryDirectory(dir=source.parent) as root,
        IndexService.open(root=root, storage=_uri(place), background=False, local_keep_s=0) as index,
    ):
        for path in sorted(source.iterdir()):
            with pa.ipc.open_file(path) as entries:
                index.put_batch(entries.get_batch(0))
            index.seal()
            index.run_lifecycle()


@contextlib.contextmanager
def writer(place: dict[str, str]) -> Iterator[Callable[[str], None]]:
    """Yield a function that puts an entry of a key with the present time."""
    import time

    from tiered_index import IndexService

    with tempfile.TemporaryDirectory() as root, IndexService.open(root=root, storage=_uri(place), **_SOON) as index:
        yield lambda key: index.put(TOPIC, 0, key, 0, 1, int(time.time() * 1000))


def _uri(place: dict[str, str]) -> str:
    return f"s3://{place['bucket']}/{place['prefix']}?endpoint_url={place['endpoint_url']}"
