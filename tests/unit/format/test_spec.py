"""The code makes the tables, test vectors and hexdumps of SPEC.md again, and reads its bytes.

Run this file as a program to rewrite the generated parts of SPEC.md after a deliberate change of the format.
"""

import json
import re
import zlib
from pathlib import Path

import numpy as np

import tiered_index.format.layout as layout_module
from tests.support.compacted_files import built_filter, unsealed_image
from tests.support.foreign_lookups import find_unsealed
from tests.support.second_reader import items_in
from tests.unit.format.test_compacted import naive_slots
from tiered_index.format.compacted import Compaction
from tiered_index.format.foreign import ForeignUnsealed
from tiered_index.format.journal import BatchRecord, Journal, encode_batch, encode_open, encode_seal, parse_journal
from tiered_index.format.keys.bloom import block_number, filter_hash
from tiered_index.format.keys.hashing import code_units, fingerprint, hash_batch, java_string_hash, key_hash
from tiered_index.format.layout import NATIVE, PRESETS, ROCKETMQ, Layout, SlotMap, hash_rank
from tiered_index.format.packed import PackingOptions
from tiered_index.format.shard import ShardWriter
from tiered_index.format.trailer import parse_trailer
from tiered_index.format.unsealed import UnsealedTable
from tiered_index.format.verify import verify_compacted

SPEC = Path(layout_module.__file__).with_name("SPEC.md")
BEGIN_MS = 1_700_000_000_000
FILE_ID = "001700000000000-0123456789ab"
LAYOUT = Layout(NATIVE, NATIVE.schema, 3, 8)
ROCKETMQ_LAYOUT = Layout(ROCKETMQ, ROCKETMQ.schema, 3, 8)
ROWS = [  # topic, key, topic id, queue, offset, size, seconds after BEGIN_MS
    ("orders", "A-1", 1, 0, 100, 64, 0),
    ("orders", "A-1", 1, 0, 101, 65, 2),
    ("payments", "é", 2, 1, 7, 80, 2),
    ("payments", "😀", 2, 1, 8, 81, 5),
    ("orders", "A-2", 1, 2, 9, 66, -3),
]
VECTORS = [
    ("TopicTest", "MessageKey"),
    ("TopicTest", ""),
    ("", ""),
    ("orders", "A-1"),
    ("payments", "é"),
    ("中文", "键"),
    ("payments", "😀"),
    ("TopicTest", "\ud83d"),
    ("TopicTest", "\ude80x"),
    ("TopicTest", "\ude80\ud83d"),
    ("TopicTest", "boxvajrkywm"),
    ("TopicTest", "euuudrqcyle"),
    ("TopicAa", "k"),
    ("TopicBB", "k"),
]


def written(layout=LAYOUT):
    """Return the example's table, entries and compacted bytes."""
    topics = ["orders", "payments"]
    hashes, fingerprints = hash_batch(
        topics, np.array([topics.index(row[0]) for row in ROWS]), code_units([row[1] for row in ROWS])
    )
    columns = {
        name: np.array([row[at] for row in ROWS])
        for at, name in enumerate(("topic_id", "queue_id", "offset", "size"), 2)
    }
    table = UnsealedTable(layout, BEGIN_MS)
    columns |= {"fingerprint": fingerprints} if layout.schema.keyed else {}
    batch = table.prepare(hashes, np.array([BEGIN_MS + 1000 * row[6] for row in ROWS]), columns)
    table.commit(batch)
    compaction = Compaction(batch.entries, layout, BEGIN_MS, table.end_ms)
    pieces = compaction.pieces(
        file_id=FILE_ID,
        topics=((1, "orders"), (2, "payments")),
        source_positions={"store-a": 4096},
        lane="main",
        offset_space="commitlog",
        writer="tiered_index 0.1.0",
    )
    return table, batch.entries, b"".join(bytes(piece) for piece in pieces)


def journal_records(entries):
    batch = BatchRecord(
        1, 5, zlib.crc32(entries.tobytes()), BEGIN_MS // 1000 - 3, BEGIN_MS // 1000 + 5, BEGIN_MS + 5000
    )
    return [
        encode_open(Journal(FILE_ID, LAYOUT, BEGIN_MS, "main", 1, "commitlog", BEGIN_MS + 250)),
        encode_batch(batch, {"store-a": 4096}, [(1, "orders"), (2, "payments")]),
        encode_seal(),
    ]


def sized(text):
    """Return sizes and names of parts that are written as "4 name | 8 another"."""
    return [(int(size), name) for size, name in (part.split(" ", 1) for part in text.split(" | "))]


HEADER_PARTS = sized("4 magic | 8 begin timestamp, ms | 8 end timestamp, ms | 4 slots in use | 4 items")
ITEM_PARTS = sized("4 key_hash | 4 topic_id | 4 queue_id | 8 offset | 4 size | 4 time_diff_s | 4 fingerprint")


def dump(data, parts, start=0):
    """Return a hexdump with at most 16 bytes of one part per line. A part's first line has its note."""
    text, at = [], start
    for length, note in parts:
        for row in range(at, at + length, 16):
            piece = data[row : min(row + 16, at + length)]
            printed = note if note != "text" else "".join(chr(b) if 32 <= b < 127 else "." for b in piece)
            text.append(f"{row:08x}  {piece.hex(' '):<47}  {printed}".rstrip())
            note = note if note == "text" else ""
        at += length
    return at, "\n".join(text)


def unsealed_dump():
    table, entries, _ = written()
    data = unsealed_image(table, entries)
    parts = (
        list(HEADER_PARTS) + [(8, f"slot {s}: newest entry, unused") for s in range(3)] + [(36, "entry 0: never used")]
    )
    for index, row in enumerate(ROWS, 1):
        parts += [
            (n, f"entry {index} ({row[0]}#{row[1]}): {name}" if name == "key_hash" else name) for n, name in ITEM_PARTS
        ]
        parts += [(4, "previous")]
    parts += [(72, "entries 6 and 7: free")]
    end, text = dump(data, parts)
    assert end == len(data)
    return text


def compacted_dump():
    """Return the hexdump of the example's file of preset rocketmq, whose items have no fingerprint."""
    _, _, data = written(ROCKETMQ_LAYOUT)
    parts = list(HEADER_PARTS) + [(8, f"slot {s}: position, length") for s in range(3)]
    for index in range(len(ROWS)):
        parts += [(n, f"item {index}: {name}" if name == "key_hash" else name) for n, name in ITEM_PARTS[:-1]]
    end, text = dump(data, parts + trailer_parts(data))
    assert end == len(data)
    return text


def packed_dump():
    """Return the hexdump of the example's items as a packed file."""
    _, _, data = written()
    columns = sized("8 hash | 4 topic_id | 4 fingerprint | 4 queue_id | 4 size | 8 offset | 8 time less the line")
    parts, bits, at = [*HEADER_PARTS, (1, "run: kind"), (4, "keys")], [], 28 + 5
    for size, name in columns:
        parts += [(1, f"{name}: bits"), (size, "least")]
        bits.append(data[at])
        at += 1 + size
    keys, rows = -(-4 * sum(bits[:3]) // 8), -(-5 * sum(bits[3:]) // 8)
    parts += [(keys, "rows of keys"), (1, "first items"), (rows, "rows of items")]
    end, text = dump(data, parts + trailer_parts(data))
    assert end == len(data)
    return text


def trailer_parts(data):
    tail = parse_trailer(data, "example", len(data)).tail
    parts = [(4, f"filter: block 0, word {word}" if not word else f"word {word}") for word in range(8)]
    parts += sized("4 directory: groups | 4 blocks | 4 group 0: first_slot | 4 count | 8 position | 4 length | 4 crc32")
    parts += sized(f"4 first_block | 4 blocks | {tail.metadata_length} text | 8 tail: magic | 4 format version")
    parts += sized("4 reserved | 8 trailer position | 8 filter length | 8 directory length | 8 metadata length")
    return parts + sized("4 filter crc32 | 4 directory crc32 | 4 metadata crc32 | 4 crc32 of the 60 bytes before")


def journal_dump():
    _, entries, _ = written()
    records = journal_records(entries)
    at, text = dump(b"".join(records), [(8, "magic"), (4, "journal version")])
    for number, record in enumerate(records):
        body = len(record) - 8 - (12 if not number else 0)
        at, more = dump(b"".join(records), [(4, "length"), (4, "crc32 of length and payload"), (body, "text")], at)
        text += "\n" + more
    return text


def vectors():
    rows = [
        "| topic | key | UTF-16 code units of topic#key | Java's hash | key hash | fingerprint |",
        "|---|---|---|---:|---:|---|",
    ]
    for topic, key in VECTORS:
        encoded = f"{topic}#{key}".encode("utf-16-le", "surrogatepass")
        units = " ".join(f"{u:04x}" for u in memoryview(encoded).cast("H"))
        numbers = f"{java_string_hash(f'{topic}#{key}')} | {key_hash(topic, key)} | {fingerprint(topic, key):08x}"
        rows.append(f"| {shown(topic)} | {shown(key)} | {units} | {numbers} |")
    return "\n".join(rows)


def shown(text):
    if not text:
        return "(empty)"
    return "(lone surrogate)" if any(0xD800 <= ord(c) < 0xE000 for c in text) else f"`{text}`"


def filter_table():
    """Return the table of filters. It has a key with a fingerprint, one without, and RocketMQ's negative hash."""
    rows = ["| key hash | fingerprint | mixed x | block | bits of words 0 to 7 |", "|---:|---|---|---:|---|"]
    for hashed, second in (
        (key_hash("orders", "A-1"), fingerprint("orders", "A-1")),
        (key_hash("orders", "A-1"), 0),
        (-(2**31), 0),
    ):
        mixed = filter_hash(hashed, second)
        alone = built_filter(np.array([mixed], np.uint64))
        bits = [int(word).bit_length() - 1 for word in np.frombuffer(alone, "<u4")]
        rows.append(
            f"| {hashed} | {second:08x} | {mixed:016x} | {block_number(mixed, 3)} | {' '.join(map(str, bits))} |"
        )
    return "\n".join(rows)


def presets():
    rows = ["| preset | begin magic | end magic | order in a slot | item bytes | entry bytes | slots | items |"]
    rows.append("|---|---|---|---|---:|---:|---:|---:|")
    for preset in PRESETS.values():
        order = "newest_first" if preset.newest_first else "answer"
        sizes = f"{preset.schema.item.itemsize} | {preset.schema.entry.itemsize} | {preset.slots:,} | {preset.items:,}"
        rows.append(f"| `{preset.name}` | 0x{preset.begin_magic:08X} | 0x{preset.end_magic:08X} | {order} | {sizes} |")
    return "\n".join(rows)


def fenced(text):
    return f"```\n{text}\n```"


def slot_examples():
    """Return the slots of a few hashes under an index's base slots, split and joined."""
    maps = [SlotMap(1000), SlotMap(1000, split=3), SlotMap(1000, join=8)]
    lines = ["| key hash | b | q | base 1000 | split 3 | join 8 | rank |", "|---:|---:|---:|---:|---:|---:|---:|"]
    for hash_ in (0, 999, 1000, 772426503, 1_537_763_719, 2**31 - 1):
        rank = int(hash_rank(np.array([hash_], np.int32), maps[0].base)[0])
        slots = " | ".join(str(slots.slot_of(hash_)) for slots in maps)
        lines.append(f"| {hash_} | {hash_ % 1000} | {hash_ // 1000} | {slots} | {rank} |")
    return "\n".join(lines)


GENERATED = {
    "packed": lambda: fenced(packed_dump()),
    "slots": slot_examples,
    "presets": presets,
    "vectors": vectors,
    "unsealed": lambda: fenced(unsealed_dump()),
    "compacted": lambda: fenced(compacted_dump()),
    "journal": lambda: fenced(journal_dump()),
    "filter": filter_table,
}
_BLOCK = re.compile(r"<!-- generated: (\w+) -->\n(.*?)\n<!-- end -->", re.S)


def blocks():
    return dict(_BLOCK.findall(SPEC.read_text()))


def bytes_in(name):
    """Return the bytes of one of SPEC.md's hexdumps."""
    lines = blocks()[name].splitlines()[1:-1]
    data = b""
    for line in lines:
        assert int(line[:8], 16) == len(data)
        data += bytes.fromhex(line[10:57])
    return data


def test_generated_parts_are_current():
    assert blocks() == {name: generate() for name, generate in GENERATED.items()}


def test_the_printed_files_are_read_and_proven():
    image = ForeignUnsealed(bytes_in("unsealed"), LAYOUT, "SPEC.md")
    items = find_unsealed(image, key_hash("orders", "A-1"), BEGIN_MS, BEGIN_MS + 5000)
    assert items["offset"].tolist() == [101, 100]
    assert items["fingerprint"].tolist() == [fingerprint("orders", "A-1")] * 2
    data = bytes_in("compacted")
    assert verify_compacted(lambda position, length: data[position : position + length], len(data), "SPEC.md") == []
    meta = parse_trailer(data, "SPEC.md", len(data)).metadata
    documented = set(re.findall(r"^\| `(\w+)` \|", SPEC.read_text().split("### Metadata")[1].split("\n### ")[0], re.M))
    assert documented - {*json.loads(meta.encode())} == {"packed", "documents"}
    journal = parse_journal(bytes_in("journal"), "SPEC.md")
    assert (journal.file_id, journal.count, journal.sealed, journal.positions) == (FILE_ID, 5, True, {"store-a": 4096})


def test_a_shard_agrees_with_its_section():
    """The section has the metadata's further fields, the header, and the checksum (here in plain integers)."""
    items = np.zeros(3, NATIVE.schema.item)
    items["key_hash"], items["offset"] = [4, 5, 2005], [9, 2**40, 1]
    items["fingerprint"], items["time_diff_s"] = [1, 2**32 - 1, 3], [0, 7, 5]
    layout = Layout(NATIVE, NATIVE.schema, 1000, 8)
    times = BEGIN_MS, BEGIN_MS + 3_599_999
    writer = ShardWriter(layout, SlotMap(1000, join=8), (0, 125), *times, 3, PackingOptions.of(items, (), 3))
    begin = writer.begin()
    body = begin + bytes(writer.add(items))
    data = body + writer.finish("f", "test", "custom", {0: "t"}, {"table": "t", "window_s": 3600, "sequence": 1})
    assert begin[:4] == b"TIXS" and begin[20:] == bytes(8)
    meta = json.loads(parse_trailer(data, "shard", len(data)).metadata.encode())
    section = SPEC.read_text().split("## 10. ")[1].split("\n## ")[0]
    fields = set(re.findall(r"^\| `(\w+)` \|", SPEC.read_text().split("### Metadata")[1].split("\n### ")[0], re.M))
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.M)) == set(meta) - fields
    total = 0
    for item in items.tolist():
        row = dict(zip(items.dtype.names, item, strict=True))
        x = BEGIN_MS // 1000 + row.pop("time_diff_s")
        for value in row.values():
            x = ((x ^ value) * 0x9E3779B97F4A7C15) % 2**64
            x ^= x >> 29
        total += x
    assert meta["checksum"] == f"{total % 2**64:016x}"
    assert (meta["order"], meta["slots_crc32"], meta["slot_range"]) == ("answer", 0, [0, 125])


def test_the_printed_packed_file_is_proven_and_read_by_its_section():
    """By section 11 alone, a second reader gets the example's items."""
    data = bytes_in("packed")
    assert verify_compacted(lambda position, length: data[position : position + length], len(data), "SPEC.md") == []
    items = [item.tobytes()[:32] for of_slot in naive_slots(written()[1], LAYOUT) for item in of_slot]
    assert items_in(data) == b"".join(items) and len(items) == len(ROWS)
    meta = json.loads(parse_trailer(data, "SPEC.md", len(data)).metadata.encode())
    section = SPEC.read_text().split("## 6. ")[1].split("\n## ")[0]
    assert set(meta) <= set(re.findall(r"^\| `(\w+)` \|", section, re.M))


if __name__ == "__main__":
    SPEC.write_text(
        _BLOCK.sub(lambda m: f"<!-- generated: {m[1]} -->\n{GENERATED[m[1]]()}\n<!-- end -->", SPEC.read_text())
    )
