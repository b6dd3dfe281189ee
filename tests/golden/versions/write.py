"""Writes a sample index, and its answers, with the imported version of the package. `README.md` describes the samples.

    git worktree add /tmp/old COMMIT
    PYTHONPATH=/tmp/old python tests/golden/versions/write.py NAME PRESET [hash=mask] [compaction=spark] [expire]

It makes only calls that every version has. The expected answers come from the messages, not from the engine.
"""

import json
import shutil
import sys
import tempfile
import zipfile
from pathlib import Path

import tiered_index
from tiered_index import IndexService
from tiered_index.clock import SystemClock
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.log.log import StorageLog
from tiered_index.storage.opening import open_storage

BASE_MS, DAY_MS = 1_700_000_000_000 // 86_400_000 * 86_400_000, 86_400_000
SEGMENT = bytes(range(256)) * 64
KEYS, ROWS, DAYS = 5, 24, 4


def main(name: str, preset: str, *more: str) -> None:
    """Write NAME.zip and NAME.json beside this module."""
    folder = Path(tempfile.mkdtemp())
    uri, published, waiting, local = f"file://{folder}/storage", [], [], []
    settings = dict(option.split("=") for option in more if "=" in option)

    def put(index, day, rows, into):
        for row in range(rows):
            number = len(published) + len(waiting) + len(local)
            topic, key = ("orders", "debug-x")[row % 2], f"k{row % KEYS}"
            second = BASE_MS // 1000 + day * 86400 + (row * 3607) % 86400
            message = (topic, row % 3, key, number * 100, 50 + row, second * 1000)
            index.put(*message, source="s", source_position=number)
            into.append(message)

    index = IndexService.open(
        root=folder / "root", storage=uri, preset=preset, slots=16, items=100, background=False, **settings
    )
    for day in range(DAYS):
        for _ in range(2):
            # entries of pending files are no answers of the storage
            put(index, day, ROWS, waiting if day > 1 and settings.get("compaction") == "spark" else published)
            index.seal()
            index.run_lifecycle()
        if day == 1:
            storage, clock = open_storage(uri), SystemClock()
            log = StorageLog(storage, clock)
            log.open()
            merge(storage, log, clock, MergeOptions(window_s=86400))
    index.archive("broker", 0, len(SEGMENT), lambda at, length: SEGMENT[at : at + length], None)
    before_ms = 0
    if "expire" in more:
        from tiered_index.clock import ManualClock

        before_ms = BASE_MS + DAY_MS
        rule = tiered_index.Retention(topics={"debug-*": 30 * 86400})
        tiered_index.expire(uri, rule, yes=True, clock=ManualClock(before_ms + 30 * DAY_MS))
    put(index, DAYS, 20, local)
    index.seal()
    index.flush()
    put(index, DAYS, 20, local)
    index.flush()
    index.abandon()

    def answers(rows):
        rows_of_keys = {}
        for topic, queue, key, offset, size, timestamp_ms in rows:
            if not (topic == "debug-x" and timestamp_ms < before_ms):
                rows_of_keys.setdefault(f"{topic}#{key}", []).append((timestamp_ms, offset, queue, size))
        return {
            key: sorted(rows, key=lambda row: (-row[0], -row[1], row[2])) for key, rows in sorted(rows_of_keys.items())
        }

    here = Path(__file__).parent
    with zipfile.ZipFile(here / f"{name}.zip", "w", zipfile.ZIP_DEFLATED, compresslevel=9) as packed:
        for path in sorted(folder.rglob("*")):
            # the lease would be new when the sample is unpacked
            if not path.name.endswith(".lock") and "lease%" not in path.parts:
                packed.write(path, path.relative_to(folder))
    document = {
        "fields": ["timestamp_ms", "offset", "queue_id", "size"],
        "storage": answers(published),
        "root": answers(published + waiting + local),
        "entries": len(published),
        "position": (len(published) - 1),
    }
    (here / f"{name}.json").write_text(json.dumps(document, separators=(",", ":")) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
