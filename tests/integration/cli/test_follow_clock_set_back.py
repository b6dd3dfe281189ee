"""Damage before messages of a clock that was set back does not end the log for a command that runs only once."""

import pytest

from tests.rocketmq.messages import NOW_MS
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader

SEGMENT = 1 << 16


@pytest.fixture
def store(tmp_path):
    with StoreWriter(tmp_path / "store", segment_bytes=SEGMENT) as writer:
        puts = [writer.put("t", 0, b"b" * 50, keys=[f"k{n}"], store_ms=NOW_MS + 1_000 * n) for n in range(20)]
        puts += [writer.put("t", 0, b"b" * 50, keys=[f"k{n}"], store_ms=NOW_MS - 3_600_000 + n) for n in range(20, 60)]
    (tmp_path / "store" / "abort").touch()
    return tmp_path / "store", [put.offset for put in puts]


def damage(folder, offset):
    with open(folder / "commitlog" / ("0" * 20), "r+b") as handle:
        handle.seek(offset + 100)
        handle.write(b"ZZZ")


@pytest.mark.parametrize("skip", [False, True])
def test_damage_before_older_messages_is_an_error_or_a_loss(run_here, tmp_path, small_index, store, skip):
    folder, offsets = store
    damage(folder, offsets[15])
    done = run_here("ingest", folder, *small_index, *(["--skip-corrupt"] if skip else []))
    if not skip:
        assert (done.code, done.error["type"], done.error["offset"]) == (4, "CorruptFile", offsets[15])
        return
    assert done.code == 0, done.err
    (loss,) = done.document["losses"]
    assert (loss["kind"], loss["begin"], loss["end"]) == ("corrupt", offsets[15], offsets[16])
    assert (done.document["messages"], done.document["lag"]["bytes"]) == (59, 0)
    with IndexReader.open(root=tmp_path / "root") as reader:
        assert [n for n in range(60) if not reader.query("t", f"k{n}").items] == [15]


def test_half_a_message_before_other_bytes_is_the_end_as_ever(run_here, small_index, store):
    """A crash leaves this after the broker had cut its log: the later bytes don't begin where the half message would
    end.
    """
    folder, offsets = store
    with StoreWriter(folder, segment_bytes=SEGMENT, cut=offsets[15]) as writer:
        last = writer.put("t", 0, b"n" * 77, keys=["new"], store_ms=NOW_MS + 90_000).offset
    (folder / "abort").touch()
    damage(folder, last)
    done = run_here("ingest", folder, *small_index, "--skip-corrupt")
    assert (done.code, done.document["position"], done.document["losses"]) == (0, last, [])
    assert (done.document["torn"]["begin"], done.document["torn"]["what"]) == (last, "half a message")
