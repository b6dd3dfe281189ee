"""Our own packed files do not change: a table's shard and a native file, each also with further columns or topic ids.

`packed/` has the files, and the answers to lookups of some keys. If the format's version changes, run this file as a
program to write them again.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from tests.support.second_reader import items_in
from tiered_index import KeyedIndexItem, column
from tiered_index.format.compacted import Compaction
from tiered_index.format.keys.hashing import code_units, fingerprint, hash_batch, key_hash
from tiered_index.format.layout import NATIVE, Layout, SlotMap
from tiered_index.format.packed import PackingOptions
from tiered_index.format.schema import Schema
from tiered_index.format.shard import ShardWriter, answer_sorted
from tiered_index.format.trailer import FORMAT_VERSION, TAIL_SIZE, parse_trailer
from tiered_index.format.verify import verify_compacted, verify_shard

FOLDER = Path(__file__).parent / "packed"
BEGIN_MS = 1_700_006_400_000
COUNT = 600
TOPICS = ["orders", "payments"]


@dataclass(frozen=True, kw_only=True)
class ParcelItem(KeyedIndexItem):
    depot: int = column(">u2", identity=True)
    weight: float = column(">f8")
    label: bytes = column("S11", default=b"")


SCHEMAS = {"fixed": NATIVE.schema, "extended": Schema.of(ParcelItem), "numbered": NATIVE.schema}
IDS = {"fixed": (1, 2), "extended": (1, 2), "numbered": (2**30 + 77, 2**31 - 9)}
NAMES = [f"{kind}_{schema}" for kind in ("table", "native") for schema in SCHEMAS]


def entries_of(schema: Schema, ids: tuple[int, int]) -> npt.NDArray[Any]:
    """Return the entries in order of insertion: a hot key, keys of eight entries, keys of one; some are late.

    `ids` are those of `TOPICS`.
    """
    number = np.arange(COUNT)
    keys = ["hot" if n % 30 == 0 else f"eight-{n // 8 % 40}" if n % 2 else f"one-{n}" for n in number.tolist()]
    topics = number // 8 % 2
    hashes, fingerprints = hash_batch(TOPICS, topics, code_units(keys))
    entries = np.zeros(COUNT, schema.entry)
    entries["key_hash"], entries["fingerprint"] = hashes, fingerprints
    entries["topic_id"] = np.array(ids)[topics]
    entries["queue_id"] = number * 5 % 8
    entries["size"] = 200 + number * 7919 % 800
    entries["offset"] = 2**40 + np.cumsum(entries["size"].astype(np.int64))
    entries["time_diff_s"] = number * 4 - np.where(number % 97 == 3, 400, 0)
    if "depot" in (entries.dtype.names or ()):
        entries["depot"], entries["weight"] = number % 300 * 200, number * 0.375 - 20
        entries["label"] = [f"parcel-{n % 1000}" for n in number.tolist()]
    return entries


def written_file(name: str) -> bytes:
    """Return the file that our writers make."""
    kind, form = name.split("_")
    schema, ids = SCHEMAS[form], IDS[form]
    entries, slots = entries_of(schema, ids), SlotMap(50, split=2)
    layout, topics = Layout(NATIVE, schema, slots.base, 1000), dict(zip(ids, TOPICS, strict=True))
    if kind == "native":
        about = {"file_id": name, "topics": tuple(topics.items()), "source_positions": {"store-a": 4096}}
        end_ms = BEGIN_MS + 4000 * COUNT
        compaction = Compaction(entries, layout, BEGIN_MS, end_ms)
        about |= {"lane": "main", "offset_space": "commitlog", "writer": "test"}
        return b"".join(map(bytes, compaction.pieces(**about)))
    items = np.zeros(COUNT, schema.item)
    for each in items.dtype.names or ():
        items[each] = entries[each]
    items["time_diff_s"] += 400
    items = items[answer_sorted(items, items["time_diff_s"].astype(np.int64), slots, schema)]
    times = BEGIN_MS, BEGIN_MS + 3_599_999
    options = PackingOptions.of(items, topics, COUNT)
    writer = ShardWriter(layout, slots, (0, slots.slots), *times, COUNT, options)
    parts = [writer.begin(), bytes(writer.add(items))]
    more = {"table": "0123456789abcdef", "window_s": 3600, "sequence": 7}
    return b"".join([*parts, writer.finish(name, "test", "commitlog", topics, more)])


def answers(data: bytes) -> dict[str, list[list[Any]]]:
    """Return the answers to lookups of some keys; each reads only the run that the directory names."""
    trailer = parse_trailer(data, "file", len(data))
    metadata, rows_of_keys = trailer.metadata, {}
    for topic in TOPICS:
        for key in ("hot", "eight-2", "eight-33", "one-2", "one-598", "absent"):
            wanted = key_hash(topic, key)
            runs = trailer.directory.runs_of(np.array([metadata.slot_map.slot_of(wanted)]), 0, 2**40)
            parts = [metadata.items_of(data[r.offset : r.offset + r.length], r.count, "file") for r in runs]
            items = np.concatenate(parts)
            rows = items[(items["key_hash"] == wanted) & (items["fingerprint"] == fingerprint(topic, key))].tolist()
            rows_of_keys[f"{topic}#{key}"] = [[v.decode() if isinstance(v, bytes) else v for v in row] for row in rows]
    return rows_of_keys


@pytest.mark.parametrize("name", NAMES)
def test_writers_make_the_same_bytes(name: str) -> None:
    assert written_file(name) == (FOLDER / f"{name}.index").read_bytes()


@pytest.mark.parametrize("name", NAMES)
def test_the_stored_files_pass_verify_and_answer_and_a_second_reader_has_the_same_items(name: str) -> None:
    data = (FOLDER / f"{name}.index").read_bytes()
    verify = verify_shard if name.startswith("table") else verify_compacted
    assert verify(lambda position, length: data[position : position + length], len(data), name) == []
    rows_of_keys = answers(data)
    assert rows_of_keys == json.loads((FOLDER / "answers.json").read_text())[name]
    assert [len(rows) for key, rows in rows_of_keys.items() if key.startswith("orders")] == [9, 8, 0, 1, 1, 0]
    trailer = parse_trailer(data, name, len(data))
    form = name.split("_")[1]
    assert trailer.metadata.more["packed"].get("topics", []) == (list(IDS[form]) if form == "numbered" else [])
    version = int.from_bytes(data[8 - TAIL_SIZE : 12 - TAIL_SIZE], "big")
    assert version == FORMAT_VERSION
    runs = trailer.directory.all_runs()
    assert len(runs) > 1
    pieces = [data[run.offset : run.offset + run.length] for run in runs]
    items, _ = trailer.metadata.packing.unpack(pieces, np.array([run.count for run in runs]), name)
    assert items_in(data) == items.tobytes() and len(items) == COUNT


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    files = {name: written_file(name) for name in NAMES}
    for name, data in files.items():
        (FOLDER / f"{name}.index").write_bytes(data)
    document = json.dumps({name: answers(data) for name, data in files.items()})
    (FOLDER / "answers.json").write_text(document.replace("]], ", "]],\n").replace("}, ", "},\n") + "\n")
