"""Writes a sample with every kind of stored document, with the imported version of the package.

    git worktree add /tmp/old COMMIT
    PYTHONPATH=/tmp/old python tests/golden/versions/write_documents.py COMMIT

`documents/COMMIT.zip` has the storages `index` and `staged` with their writers' roots, and a follower's memory. Some
topics, keys and sources have lone surrogates, which later versions refuse. `README.md` describes the samples.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import tiered_index
from tiered_index import IndexService
from tiered_index.clock import ManualClock, SystemClock
from tiered_index.rocketmq.follow.fingerprints import LogFingerprints, RangeFingerprint
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log import kept, state
from tiered_index.service.log import log as log_module
from tiered_index.service.log.log import StorageLog
from tiered_index.service.read import rows
from tiered_index.storage.disk import Disk
from tiered_index.storage.opening import open_storage

T, DAY_MS = 1_700_000_000_000, 86_400_000
SEGMENT = bytes(range(256)) * 64


def main(commit: str) -> None:
    """Write the sample of a commit beside this module."""
    folder = Path(tempfile.mkdtemp())
    uri = f"file://{folder}/index"
    # versions 5 and 6 of checkpoints: rows instead of documents, and changes, if there are many objects
    state.MOST_DOCUMENTS = 3
    if commit == "10df0670":
        state._CHANGES_SHARE, log_module._WHOLE_BYTES, kept._WHOLE_BYTES = 0, 0, 0
        # the other versions took lone surrogates
        rows.check_text.__code__ = (lambda name, text: text).__code__
    index = _opened(folder / "root", uri)
    for day in range(4):
        _put(index, day, 40, day * 100)
        _publish(index)
    index.archive("broker", 0, len(SEGMENT), lambda at, length: SEGMENT[at : at + length], None)
    if hasattr(index, "archive_columns"):
        index.archive_columns("kafka", 0, 3, b"x" * 40 + (8).to_bytes(4, "little") + b"PAR1")
    for number, key in enumerate(("a", "\ud800")):
        index.put("t\ud800", 0, key, 5000 + number, 50, T + 4 * DAY_MS, source="lone\udfff", source_position=number + 1)
    _publish(index)
    # a wrong clock
    index.put("orders", 0, "k0", 6000, 50, 10_000, source="s", source_position=6000)
    _publish(index)
    storage, clock = open_storage(uri), SystemClock()
    log = StorageLog(storage, clock)
    log.open()
    merge(storage, log, clock, MergeOptions(window_s=86400))
    rule = tiered_index.Retention(topics={"debug-*": 30 * 86400})
    tiered_index.expire(uri, rule, yes=True, clock=ManualClock(T + 31 * DAY_MS))
    tiered_index.erase(uri, "orders", keys=["k1"], yes=True)
    _put(index, 5, 20, 7000)
    index.seal()
    index.flush()
    _put(index, 5, 20, 8000)
    index.flush()
    index.abandon()
    staged = _opened(folder / "staged_root", f"file://{folder}/staged", compaction="spark")
    for day in range(2):
        _put(staged, day, 30, 100 * day)
        _publish(staged)
    staged.abandon()
    memory = LogFingerprints.load(folder / "root", "rocketmq:x", Disk())
    memory.ranges = [RangeFingerprint(100, 60, 40, 1, 1), RangeFingerprint(200, 160, 40, 2, 2, 100, 3)]
    memory.add_rewritten(20, 40, T)
    memory.save()
    target = Path(__file__).parent / "documents" / f"{commit}.zip"
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(folder.rglob("*")):
            if path.name != "lock" and not path.name.startswith(".tmp-") and "cache" not in path.parts:
                packed.write(path, path.relative_to(folder))
    shutil.rmtree(folder)


def _opened(root: Path, uri: str, **settings: str) -> IndexService:
    return IndexService.open(root=root, storage=uri, slots=16, items=100, background=False, **settings)


def _put(index: IndexService, day: int, count: int, first: int) -> None:
    for number in range(count):
        topic, offset = ("orders", "debug-x")[number % 2], first + number
        at_ms = T + day * DAY_MS + number * 1000
        index.put(topic, 0, f"k{number % 5}", offset, 50, at_ms, source="s", source_position=offset)


def _publish(index: IndexService) -> None:
    index.seal()
    index.run_lifecycle()


if __name__ == "__main__":
    main(sys.argv[1])
