"""`export --format rocketmq`: every golden query finds an index's entries in the exported files.

If puts were in order of time, the files are Java's own, byte for byte.
"""

import pyarrow as pa
import pytest

from tests.golden import naive
from tests.support.disk_faults import FaultDisk
from tests.support.foreign_lookups import find_unsealed
from tiered_index import IndexService
from tiered_index.cli.write.export import RocketmqFiles, rocketmq_layout
from tiered_index.format.foreign import ForeignUnsealed
from tiered_index.format.layout import HEADER_SIZE, ROCKETMQ
from tiered_index.storage.memory import MemoryStorage

# their puts are in order of time: Java's file has the same slots and entries
SAME = {"cap_same_key_1500", "exact_full", "exact_full_unsealed_magic", "multikey_full"}


@pytest.mark.parametrize("state", ["unsealed", "uploaded"])
def test_every_query_finds_its_rows(case, tmp_path, state):
    rows = case.written_rows
    # a put refuses empty keys and half of a surrogate pair
    if not rows or len(rows) > 2_000 or not all(row.key for row in rows) or case.name == "lone_surrogate":
        return
    geometry = {"slots": case.meta["slots"], "items": case.meta["items"]}
    (tmp_path / "out").mkdir()
    layout = rocketmq_layout(ROCKETMQ.schema, "abs", *geometry.values())
    files = RocketmqFiles(tmp_path / "out", layout)
    where = {"root": tmp_path / "root", "storage_backend": MemoryStorage(), "disk": FaultDisk()}
    chosen = {"preset": "rocketmq", "hash": "abs", "background": False, "max_late_s": 10**10, "max_early_s": 10**10}
    with IndexService.open(**where, **chosen, **geometry) as index:
        for row in rows:
            index.put(row.topic, row.queue_id, row.key, *row[4:], topic_id=row.topic_id)
        if state == "uploaded":
            index.seal()
            index.run_lifecycle()
        export = index.export()
        files.write_table(pa.Table.from_batches(export, export.schema))
        files.close()
    images = [ForeignUnsealed(path.read_bytes(), layout, path.name) for path in (tmp_path / "out").iterdir()]
    for query in case.queries:
        key_hash, limits = naive.java_hash(query["topic"], query["key"]), (query["begin"], query["end"])
        items = [
            (*item.tolist()[:5], image.header.begin_ms // 1000 + int(item["time_diff_s"]))
            for image in images
            for item in find_unsealed(image, key_hash, *limits)
        ]
        wanted = [
            (*expected_item[:5], row.timestamp_ms // 1000)
            for row in rows
            for expected_item in [naive.item_of(row, case.begin_ms)]
            if expected_item.key_hash == key_hash and limits[0] <= row.timestamp_ms // 1000 * 1000 <= limits[1]
        ]
        assert sorted(items) == sorted(wanted)
    if case.name in SAME and state == "unsealed":
        (path,) = (tmp_path / "out").iterdir()
        # except the header, which has milliseconds in Java's file
        assert path.read_bytes()[HEADER_SIZE:] == case.unsealed[HEADER_SIZE:]
