"""RocketMQ's own code reads files of preset `rocketmq` during their writing.

`IndexStoreFile` trusts header and slot table, knows no journal, and names files by their begin time.
"""

import errno
import struct

import pytest

from tests.support.disk_faults import FaultDisk
from tiered_index import hash_key
from tiered_index.errors import CorruptFile

T = 1_700_000_000_000
SLOTS = 7


def found_by_java(data, key):
    """Return the offsets that `IndexStoreFile.queryAsyncFromUnsealedFile` finds, newest first, by its steps."""
    (items,) = struct.unpack_from(">i", data, 24)
    sought = hash_key("t", key, "mask")
    (at,) = struct.unpack_from(">i", data, 28 + 8 * (sought % SLOTS))
    offsets = []
    while 0 < at <= items:
        key_hash, _, _, offset, _, _, previous = struct.unpack_from(">iiiqiii", data, 28 + 8 * SLOTS + 32 * at)
        offsets += [offset] if key_hash == sought else []
        at = previous
    return offsets


@pytest.fixture
def disk():
    return FaultDisk()


@pytest.fixture
def life(open_index, disk):
    index = open_index("root", preset="rocketmq", slots=SLOTS, items=200, disk=disk)

    def put(offsets):
        for offset in offsets:
            index.put("t", 0, f"a-longer-key-{offset % 5}", offset, 10, T + 1000 * offset)
        index.flush()

    def seen():
        (path,) = (index.config.root / "unsealed").glob("0*.index")
        data = path.read_bytes()
        return {offset for number in range(5) for offset in found_by_java(data, f"a-longer-key-{number}")}

    index.seen, index.fill = seen, put
    return index


def test_a_live_file_is_at_most_ten_seconds_behind(life, clock):
    life.fill(range(20))
    assert life.seen() == set(range(20))
    life.fill(range(20, 30))
    clock.advance(9)
    life.flush()
    assert life.seen() == set(range(20)), "during writes RocketMQ finds every chain whole"
    clock.advance(1)
    life.flush()  # the flusher also runs if there is nothing to flush
    assert life.seen() == set(range(30))
    clock.advance(10)
    life.fill(range(30, 40))
    life.abandon()  # killed
    assert life.seen() == set(range(40))


def test_the_header_is_written_before_the_heads(life, disk, clock):
    """If a head exceeds the header's count, a lookup at that moment misses the whole chain."""
    life.fill(range(5))
    clock.advance(10)
    states = []
    disk.watch = lambda _: states.append(life.seen())
    life.fill(range(5, 40))
    disk.watch = None
    assert len(states) > 5 and all(state >= set(range(5)) for state in states) and life.seen() == set(range(40))


@pytest.mark.parametrize("preset", ["rocketmq", "native"])
def test_no_two_files_begin_in_one_second(open_index, clock, preset):
    """RocketMQ's service keys files by their begin time.

    Of several files with one begin it would keep only the last.
    """
    index = open_index("root", preset=preset, items=5, local_keep_s=0)
    for offset in range(30):
        index.put("t", 0, f"a-longer-key-{offset}", offset, 10, T + 10 * offset)
        if offset == 15:
            index.seal()
            index.run_lifecycle()  # files that only the storage has also count
            index.run_lifecycle()
    # one older entry, and two in quarantine
    index.put("t", 0, "a-longer-key-0", 30, 10, T - 1000)
    index.put("t", 0, "a-longer-key-0", 31, 10, 0)
    index.put("t", 0, "a-longer-key-0", 32, 10, 999)
    index.flush()
    begins = [handle.file_id.partition("-")[0] for handle in index.files()]
    assert len(begins) > 8
    assert (len(set(begins)) == len(begins)) is (preset == "rocketmq")
    for offset in range(1, 30):
        (item,) = index.query("t", f"a-longer-key-{offset}")
        assert (item.offset, item.timestamp_ms) == (offset, T + 10 * offset // 1000 * 1000)
    times = {item.offset: item.timestamp_ms for item in index.query("t", "a-longer-key-0")}
    assert times == {0: T, 30: T - 1000, 31: 0, 32: 0}


@pytest.mark.parametrize("preset", ["rocketmq", "native"])
def test_an_index_notices_that_rocketmq_opened_a_file(open_index, preset):
    """RocketMQ's tiered store checks no magic. It writes its own header into each file that it opens, then puts
    entries.

    An index reports such a file, and never silently answers with fewer entries.
    """
    index = open_index("root", preset=preset, slots=SLOTS, items=200)
    index.put("t", 0, "a-longer-key", 1, 10, T)
    index.close()
    (path,) = (index.config.root / "unsealed").glob("0*.index")
    data = bytearray(path.read_bytes())
    struct.pack_into(">Iqq", data, 0, 0xBCC50289, T, T)  # `flushNewMetadata`, as its constructor calls it
    path.write_bytes(data)
    again = open_index("root")
    if preset == "rocketmq":
        assert len(again.query("t", "a-longer-key")) == 1
    else:
        with pytest.raises(CorruptFile, match="header contradicts the journal"):
            again.query("t", "a-longer-key")
        again.abandon()
    (entry,) = struct.iter_unpack(">iiiqiii", data[28 + 8 * SLOTS + 32 : 28 + 8 * SLOTS + 64])
    # another entry overwrites ours
    struct.pack_into(">iiiqiii", data, 28 + 8 * SLOTS + 32, *entry[:3], 900_000, *entry[4:])
    again.abandon()
    path.write_bytes(data)
    with pytest.raises(CorruptFile):
        open_index("root").query("t", "a-longer-key")


def test_a_table_that_cannot_be_written_waits(life, disk, clock):
    """Entries and journal alone make entries durable.

    So the flush succeeds, and the next flush writes the table again.
    """
    life.fill(range(5))
    clock.advance(10)
    # the writes of the entries and of the journal succeed
    disk.fail("pwrite", nth=3, times=None, error=errno.ENOSPC)
    life.fill(range(5, 9))
    disk.clear()
    assert len(life.query("t", "a-longer-key-1")) == 2
    life.flush()
    assert life.seen() == set(range(9))
