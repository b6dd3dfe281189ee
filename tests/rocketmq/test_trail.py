"""What a follower remembers of a log: witnesses, how they become fewer, and the file that keeps them."""

from __future__ import annotations

import itertools
import json
import random
import zlib

import pytest

from tests.rocketmq.followed import SEGMENT, Followed, rounds
from tiered_index.errors import CorruptFile, NotAnIndex
from tiered_index.rocketmq.follow.witnesses import LogFingerprints, RangeFingerprint, Verdict, joined_crc
from tiered_index.storage.disk import Disk


def test_stretches_that_become_one_keep_their_checksum(tmp_path):
    data = random.Random(4).randbytes(10_000)
    assert joined_crc(zlib.crc32(data[:77]), zlib.crc32(data[77:]), len(data) - 77) == zlib.crc32(data)
    assert joined_crc(5, 0, 0) == 5
    trail = LogFingerprints.load(tmp_path, "rocketmq:x", Disk())
    for at in range(0, 5_000, 10):
        trail.add(RangeFingerprint(at + 10, at, 10, 0, 1, at, zlib.crc32(data[at : at + 10])), durable=at)
    assert len(trail.witnesses) < 100
    assert max(witness.end - witness.begin for witness in trail.witnesses) > 100
    assert all(witness.stretch == zlib.crc32(data[witness.begin : witness.end]) for witness in trail.witnesses)
    gap = RangeFingerprint(6_010, 6_000, 10, 0, 1, 6_000, 7)
    trail.add(gap, durable=0)
    assert trail.witnesses[-1] == gap


def test_the_trail_keeps_what_is_not_durable_and_thins_out_what_is(tmp_path):
    disk = Disk()
    trail = LogFingerprints.load(tmp_path, "rocketmq:x", disk)
    for number in range(5_000):
        trail.add(RangeFingerprint(number * 10, max(0, number * 10 - 5), 5, number, 3), durable=number * 10 - 200)
    ends = [witness.end for witness in trail.witnesses]
    assert ends == sorted(ends)
    assert ends[-20:] == list(range(49_800, 50_000, 10))
    assert len(ends) < 64 + 21
    assert sum(witness.messages for witness in trail.witnesses) == 15_000
    assert trail.messages_behind(49_990 - 10) == 3
    assert ends[0] < 25_000  # old ones stay, the further back the fewer
    assert all(later - one <= max(10, (ends[-1] - later) // 4) for one, later in itertools.pairwise(ends))
    trail.continue_at = 7
    trail.save()
    assert LogFingerprints.load(tmp_path, "rocketmq:x", disk) == trail
    assert LogFingerprints.load(tmp_path, "rocketmq:y", disk).witnesses == []
    trail.cut(100)
    assert all(witness.end <= 100 for witness in trail.witnesses)


@pytest.mark.parametrize(
    "content", ["", "{}", "[1]", '{"follower": 2}', '{"follower": 1, "source": "other", "witnesses": []}']
)
def test_a_memory_that_cannot_be_read_is_named(tmp_path, content):
    trail = LogFingerprints.load(tmp_path, "rocketmq:x", Disk())
    trail.save()
    trail.path.write_text(content)
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
    witness = dispatcher._trail.witnesses[0]
    assert witness.look(log) is Verdict.SAME
    assert witness._replace(crc=witness.crc ^ 1).look(log) is Verdict.CHANGED
    assert witness._replace(offset=10**9).look(log) is Verdict.CHANGED
    followed.segment(0).unlink()
    assert witness.offset < SEGMENT
    assert witness.look(log) is Verdict.GONE
    assert offsets[-1] > 2 * SEGMENT
    followed.segment(1).unlink()
    assert witness._replace(offset=SEGMENT + 1).look(log) is Verdict.GONE
