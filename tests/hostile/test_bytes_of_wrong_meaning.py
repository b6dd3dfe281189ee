"""Bytes with right checksums and wrong meaning: untyped errors in lookups, in `verify` and at a writer's open, and an
endless merge.

Directories whose runs have no whole items raised `IndexError` and `ValueError`. Times and positions past 64 bits raised
`OverflowError`. Fields of other types in a journal raised `TypeError`. If a block ended before it began, a merge cut
time into single seconds.
"""

import json
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.reliability.hostile_tree import small_parts
from tests.reliability.resealed import journal_record
from tests.support.cold_index import ColdIndex, cold_index
from tests.support.disk_faults import FaultDisk
from tests.support.filled import merge_all
from tests.support.hanging import beside
from tests.support.log_records import checkpoint_document
from tiered_index import IndexReader, IndexService, Lookup
from tiered_index.base.clock import ManualClock
from tiered_index.errors import CorruptFile, TieredIndexError
from tiered_index.format.journal import Journal, encode_open, parse_journal
from tiered_index.format.layout import NATIVE, Layout
from tiered_index.format.trailer import FORMAT_VERSION, TAIL_SIZE, Directory, parse_trailer
from tiered_index.format.verify import verify_shard
from tiered_index.service.log import checkpoint
from tiered_index.service.log.records import LogRecord, encode_document
from tiered_index.service.log.state import LogState
from tiered_index.storage.memory import MemoryStorage

CLOCK = ManualClock(1_700_000_000_000 + 10**9)
MANY = 4_000_000
Opening = Callable[..., IndexService]
Change = Callable[[Any, Any, dict[str, Any]], object]


@pytest.fixture
def open_index(tmp_path: Path) -> Iterator[Opening]:
    """Open a writer at `tmp_path / root`; all writers are dropped at the end."""
    opened: list[IndexService] = []

    def make(**settings: Any) -> IndexService:
        where = {"root": tmp_path / "root", "storage_backend": storage, "disk": FaultDisk(), "clock": CLOCK}
        opened.append(IndexService.open(**where, **({"slots": 7, "items": 64, "background": False} | settings)))
        return opened[-1]

    storage = MemoryStorage()
    yield make
    for service in opened:
        service.abandon()


@pytest.fixture
def index(tmp_path: Path) -> ColdIndex:
    """An index whose slots are so full that their groups are cut into blocks."""
    with small_parts():
        return cold_index(tmp_path / "root", files=2, entries=60, slots=2)


def resealed(data: bytes, change: Change) -> bytes:
    """Return a file with changed directory and metadata, of the same size, with right CRCs everywhere."""
    trailer = parse_trailer(data, "whole", len(data))
    tail = trailer.tail
    groups, blocks = trailer.directory.groups.copy(), trailer.directory.blocks.copy()
    body, held = data[: tail.position], data[tail.position : tail.directory_position]
    meta = json.loads(trailer.metadata.encode())
    change(groups, blocks, meta)
    for table in (groups, blocks):
        for run in table:
            run["crc32"] = zlib.crc32(body[int(run["offset"]) : int(run["offset"]) + int(run["length"])])
    directory = Directory(groups, blocks).encode()
    metadata = json.dumps(meta, separators=(",", ":")).encode().ljust(tail.metadata_length)
    parts = held, directory, metadata
    end = struct.pack(
        ">8sIIQQQQIII", b"TIXTAIL\n", FORMAT_VERSION, 0, tail.position, *map(len, parts), *map(zlib.crc32, parts)
    )
    changed = body + held + directory + metadata + end + struct.pack(">I", zlib.crc32(end))
    assert len(changed) == len(data) and len(end) + 4 == TAIL_SIZE
    return changed


def empty_block(groups: Any, blocks: Any, meta: Any) -> None:
    blocks["length"][1] += blocks["length"][0]
    blocks["count"][1] += blocks["count"][0]
    blocks["offset"][1] = blocks["offset"][0]
    blocks["length"][0] = blocks["count"][0] = 0


def half_items(groups: Any, blocks: Any, meta: Any) -> None:
    blocks["length"] -= 3
    groups["length"] -= 3


def overlapping(groups: Any, blocks: Any, meta: Any) -> None:
    blocks["offset"][1:] = blocks["offset"][0]


def ends_before_it_begins(groups: Any, blocks: Any, meta: Any) -> None:
    """A second then has an endless number of its entries."""
    blocks["second_max"] = blocks["second_min"] - 1


def many_items(groups: Any, blocks: Any, meta: Any) -> None:
    groups["count"] = 2**32 - 1
    blocks["count"] = 2**32 - 1
    meta["count"] = MANY
    meta["writer"] = ""


def endless_time(groups: Any, blocks: Any, meta: Any) -> None:
    meta["second_max"] = 10**22
    meta["writer"] = ""


def foreign_blocks(groups: Any, blocks: Any, meta: Any) -> None:
    groups["first_block"] += 1000


CHANGES = (empty_block, half_items, overlapping, ends_before_it_begins, many_items, endless_time, foreign_blocks)


def spoil(storage: MemoryStorage, name: str, change: Change) -> None:
    storage.put(name, resealed(storage.get(name), change))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_lookups(index: ColdIndex, change: Change) -> None:
    for stored in index.stored:
        spoil(index.inner, stored.name, change)  # type: ignore[arg-type]
    with index.reader() as reader:
        with pytest.raises(CorruptFile, match="data/"):
            reader.query("t", "all")
        with pytest.raises(CorruptFile, match="data/"):
            list(reader.query_many([Lookup(topic="t", key="all"), Lookup(topic="t", key="k0-1")]))


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_shards(index: ColdIndex, change: Change) -> None:
    with small_parts():
        merge_all(index.inner, CLOCK)
    # it has the unchanged directories
    with IndexReader.open(storage_backend=index.inner) as reader:
        cut = [stored for stored in reader.log_state.objects.values() if b'"slot_map"' in index.inner.get(stored.name)]
        for stored in cut:
            data = index.inner.get(stored.name)
            if len(parse_trailer(data, "whole", len(data)).directory.blocks):
                spoil(index.inner, stored.name, change)  # type: ignore[arg-type]
                data = index.inner.get(stored.name)
                findings = verify_shard(lambda at, size, d=data: d[at : at + size], len(data), "f")  # type: ignore[misc]
                assert {finding.part for finding in findings} & {"directory", "metadata"}
        with pytest.raises(CorruptFile, match="data/"):
            reader.query("t", "all")


@pytest.mark.parametrize("change", [many_items, half_items, endless_time], ids=lambda change: change.__name__)
def test_merges_come_to_an_end(tmp_path: Path, change: Change) -> None:
    """Counts that agree in object and log made each of many slots a separate piece, read second by second."""
    index = cold_index(tmp_path / "root", files=2, entries=60, slots=100_000)
    for stored in index.stored:
        spoil(index.inner, stored.name, change)  # type: ignore[arg-type]
    if change is many_items:
        for info in [*index.inner.list("log/"), *index.inner.list("checkpoint/")]:
            document = json.loads(index.inner.get(info.name).rpartition(b"\n#crc32 ")[0])
            for stated in (*document.get("add", ()), *document.get("objects", ())):
                stated["count"] = MANY
            index.inner.put(info.name, encode_document(document))

    def merge() -> None:
        with small_parts(), pytest.raises(CorruptFile):
            merge_all(index.inner, CLOCK)

    outcome = beside(merge)()
    assert outcome is None, outcome


def test_a_checkpoint_of_impossible_numbers_is_passed_over(index: ColdIndex, caplog: pytest.LogCaptureFixture) -> None:
    """The records have the state that it caches."""
    name = max(info.name for info in index.inner.list("checkpoint/"))
    document = checkpoint_document(index.inner.get(name))
    for column, wrong in (
        ("second_max", 10**30),
        ("count", -1),
        ("tail", "../../x"),
        ("file_id", "../x"),
        ("second_min", 2**62),
        ("filter_length", 33),
    ):
        columns = {**document["objects"], column: [wrong, *document["objects"][column][1:]]}
        index.inner.put(name, checkpoint.encode({**document, "objects": columns}))
        with pytest.raises(CorruptFile, match=name):
            LogState.decode(index.inner.get(name), name)
        with index.reader() as reader:
            assert [item.offset for item in reader.query("t", "all")] == [119, 59]


JOURNALS: dict[str, dict[str, Any]] = {
    "a list as id": {"file_id": ["x"]},
    "another file's id": {"file_id": "000000000000000-000000000000"},
    "a path as id": {"file_id": "../x"},
    "no lane": {"lane": None},
    "a number as lane": {"lane": 5},
    "time of text": {"begin_ms": "x"},
    "a time past 64 bits": {"begin_ms": 10**30},
    "endless time": {"begin_ms": float("inf")},
    "no order": {"sequence": None},
    "a flag as order": {"sequence": True},
    "nobody before": {"predecessor": [None, None]},
    "a list before": {"predecessor": [[], 1]},
    "a short list before": {"predecessor": ["a"]},
    "text before": {"predecessor": "x"},
    "an endless count before": {"predecessor": ["a", float("inf")]},
    "endless room": {"log_number": 2**70},
}


@pytest.mark.parametrize("change", JOURNALS.values(), ids=JOURNALS)
def test_a_journal_of_other_types(open_index: Opening, tmp_path: Path, change: dict[str, Any]) -> None:
    """The file is kept and reported as damaged, and the writer continues."""
    index = open_index()
    index.put("t", 0, "k", 1, 1, 1_700_000_000_000)
    index.flush()
    index.abandon()
    (path,) = (tmp_path / "root" / "unsealed").glob("*.journal")
    data = path.read_bytes()
    length = int.from_bytes(data[12:16], "big")
    payload = json.dumps(json.loads(data[20 : 20 + length]) | change).encode()
    path.write_bytes(data[:12] + journal_record(payload) + data[20 + length :])
    before = path.read_bytes()
    with open_index() as index:
        index.put("t", 0, "k2", 2, 1, 1_700_000_000_000)
        index.flush()
        with pytest.raises(TieredIndexError, match=path.stem):
            index.query("t", "k")
    assert path.read_bytes() == before


def test_a_journal_that_names_another_file_leaves_that_one_alone(open_index: Opening, tmp_path: Path) -> None:
    """It was taken for the other file's journal, and that file was cut to its length."""
    index = open_index()
    for number in range(6):
        index.put("t", 0, "k", number, 1, 1_700_000_000_000 + 1000 * number)
        index.flush()
    index.seal()
    index.put("t", 0, "new", 1, 1, 1_700_000_000_000)
    index.flush()
    index.abandon()
    journals = (tmp_path / "root" / "unsealed").glob("*.journal")
    short, long = sorted(journals, key=lambda path: path.stat().st_size)
    before = long.read_bytes()
    short.write_bytes(before[: 20 + int.from_bytes(before[12:16], "big")])
    with pytest.raises(CorruptFile):
        parse_journal(short.read_bytes(), str(short), short.stem)
    open_index().abandon()
    assert long.read_bytes() == before


NESTED = b'{"kind":' + b"[" * 100_000 + b"]" * 100_000 + b"}"


def test_documents_that_are_nested_too_deeply_or_have_endless_numbers() -> None:
    start = encode_open(Journal("id", Layout(NATIVE, NATIVE.schema, 8, 8), 0, "main", 1, "custom", 1))[:12]
    with pytest.raises(CorruptFile, match="the-journal"):
        parse_journal(start + journal_record(NESTED), "the-journal")
    document = json.loads(LogRecord(1, "publish", 1, "a", 0).encode().splitlines()[0])
    nested = NESTED + b"\n#crc32 " + f"{zlib.crc32(NESTED):08x}\n".encode()
    for record in (encode_document(document | {"epoch": float("inf")}), nested):
        with pytest.raises(CorruptFile, match="log/1"):
            LogRecord.decode(record, "log/1")


# the presets differ only in the size of an entry
@pytest.mark.parametrize(("preset", "nth"), [("rocketmq", 3), ("native", 1), ("native", 4)])
@pytest.mark.parametrize("previous", [39, 40, 41, 2**31 - 1, -(2**31), "itself"])
def test_both_kinds_of_lookup_scan_a_broken_chain(open_index: Opening, preset: str, previous: Any, nth: int) -> None:
    """No verified file has a chain that points forward. `query_many` took the place where it stopped for its end."""
    service = open_index(preset=preset, slots=4)
    keys = [f"k{number}" for number in range(8)]
    for number in range(40):
        service.put("t", 0, keys[number % 8], number, 1, 1_700_000_000_000)
    service.flush()
    (file,) = service.files()
    entry = 8 * nth + 1  # of k0; entries count from 1
    wrong = entry if previous == "itself" else previous
    with file.path.open("r+b") as stream:
        stream.seek(file.layout.entry_position(entry + 1) - 4)
        stream.write(wrong.to_bytes(4, "big", signed=True))
    together = service.query_many([Lookup(topic="t", key=key) for key in keys])
    for number, key in enumerate(keys):
        wanted = list(range(32 + number, -1, -8))
        for result in (service.query("t", key), together[number], service.query_many([("t", key)])[0]):
            assert (result.status, [item.offset for item in result]) == ("complete", wanted)
