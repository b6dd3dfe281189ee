"""A follower's record of a log: fingerprints, how old ones are combined, and the file that stores them."""

from __future__ import annotations

import itertools
import json
import random
import zlib

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, rounds
from tiered_index.errors import CorruptFile, NotAnIndex
from tiered_index.rocketmq.follow.fingerprints import LogFingerprints, RangeFingerprint, Verdict, joined_crc
from tiered_index.rocketmq.log.segments import list_segments
from tiered_index.storage.disk import Disk


def test_stretches_that_become_one_keep_their_checksum(tmp_path):
    data = random.Random(4).randbytes(10_000)
    assert joined_crc(zlib.crc32(data[:77]), zlib.crc32(data[77:]), len(data) - 77) == zlib.crc32(data)
    assert joined_crc(5, 0, 0) == 5
    kept = LogFingerprints.load(tmp_path, "rocketmq:x", Disk())
    for at in range(0, 5_000, 10):
        kept.add(RangeFingerprint(at + 10, at, 10, 0, 1, at, zlib.crc32(data[at : at + 10])), durable=at)
    assert len(kept.ranges) < 100
    assert max(one.end - one.begin for one in kept.ranges) > 100
    assert all(one.range_crc == zlib.crc32(data[one.begin : one.end]) for one in kept.ranges)
    gap = RangeFingerprint(6_010, 6_000, 10, 0, 1, 6_000, 7)
    kept.add(gap, durable=0)
    assert kept.ranges[-1] == gap


def test_fingerprints_keep_what_is_not_durable_and_thin_out_what_is(tmp_path):
    disk = Disk()
    kept = LogFingerprints.load(tmp_path, "rocketmq:x", disk)
    for number in range(5_000):
        kept.add(RangeFingerprint(number * 10, max(0, number * 10 - 5), 5, number, 3), durable=number * 10 - 200)
    ends = [one.end for one in kept.ranges]
    assert ends == sorted(ends)
    assert ends[-20:] == list(range(49_800, 50_000, 10))
    assert len(ends) < 64 + 21
    assert sum(one.messages for one in kept.ranges) == 15_000
    assert kept.messages_behind(49_990 - 10) == 3
    assert ends[0] < 25_000  # old ones stay, and are sparser with age
    assert all(later - one <= max(10, (ends[-1] - later) // 4) for one, later in itertools.pairwise(ends))
    kept.continue_at = 7
    kept.save()
    assert LogFingerprints.load(tmp_path, "rocketmq:x", disk) == kept
    assert LogFingerprints.load(tmp_path, "rocketmq:y", disk).ranges == []
    kept.cut(100)
    assert all(one.end <= 100 for one in kept.ranges)


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"follower": 2}', '{"follower": 1, "source": "other", "witnesses": []}']
)
def test_a_memory_that_cannot_be_read_is_named(tmp_path, content):
    kept = LogFingerprints.load(tmp_path, "rocketmq:x", Disk())
    kept.save()
    kept.path.write_text(content)
    with pytest.raises(CorruptFile, match="unchecked"):
        LogFingerprints.load(tmp_path, "rocketmq:x", Disk())


def test_the_memory_is_written_whole_or_not_and_leftovers_go(followed):
    followed.write(5)
    dispatcher = followed.dispatcher()
    dispatcher.run_once()
    folder = followed.folder / "root" / "followers"
    (file,) = folder.iterdir()
    assert json.loads(file.read_text())["source"] == f"rocketmq:{followed.path}"
    (folder / ".tmp-0123456789abcdef").write_bytes(b"half")
    followed.crash_index()
    assert [path.name for path in folder.iterdir()] == [file.name]


def test_a_root_of_nobody_may_have_an_empty_folder_of_followers(tmp_path):
    (tmp_path / "root" / "followers").mkdir(parents=True)
    (tmp_path / "root" / "followers" / "x.json").touch()
    with pytest.raises(NotAnIndex, match="followers"):
        Followed(tmp_path)
    (tmp_path / "root" / "followers" / "x.json").unlink()
    Followed(tmp_path).index.close()


def test_verdicts(followed):
    offsets = followed.write(200)
    dispatcher = followed.dispatcher()
    list(rounds(dispatcher))
    log = followed.path / "commitlog"
    one = dispatcher.fingerprints.ranges[0]
    assert one.compare_last(list_segments(log)) is Verdict.SAME
    assert one._replace(crc=one.crc ^ 1).compare_last(list_segments(log)) is Verdict.CHANGED
    assert one._replace(offset=10**9).compare_last(list_segments(log)) is Verdict.CHANGED
    followed.segment(0).unlink()
    assert one.offset < SEGMENT
    assert one.compare_last(list_segments(log)) is Verdict.GONE
    assert offsets[-1] > 2 * SEGMENT
    followed.segment(1).unlink()
    assert one._replace(offset=SEGMENT + 1).compare_last(list_segments(log)) is Verdict.GONE
