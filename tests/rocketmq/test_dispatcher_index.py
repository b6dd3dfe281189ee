"""The index's side of the dispatcher: one store per index, back-pressure, a full disk, and the lag."""

from __future__ import annotations

import errno

import pytest

from tests.rocketmq.followed import Followed, rounds, scan
from tests.support.disk_faults import FaultDisk
from tiered_index.errors import BackPressure, ConfigError, DiskFull


def test_one_index_is_of_one_store(followed, tmp_path):
    followed.write(3)
    followed.dispatcher().run_once()
    followed.index.flush()
    with pytest.raises(ConfigError, match=f"{followed.path}.*'elsewhere'.*--restart"):
        followed.dispatcher(store_name="elsewhere")
    assert followed.dispatcher(store_name="elsewhere", restart=True).run_once().messages == 3
    followed.index.flush()
    assert followed.dispatcher(store_name="elsewhere").resumed_from == followed.writer.next_offset


def test_an_index_of_other_offsets_is_refused(tmp_path):
    made = Followed(tmp_path, offset_space="custom")
    made.index.close()
    made.settings["offset_space"] = "commitlog"
    with pytest.raises(ConfigError, match="'custom', not in 'commitlog'"):
        made.open_index()


def test_back_pressure_refuses_a_whole_batch_and_the_next_round_continues(tmp_path):
    made = Followed(tmp_path, buffer_max_entries=150)
    made.write(200)
    dispatcher = made.dispatcher()
    pushed_back = 0
    for _ in range(50):
        try:
            if dispatcher.run_once().caught_up:
                break
        except BackPressure:
            pushed_back += 1
            made.index.flush()
    assert pushed_back > 1
    made.check()
    ranges = dispatcher.fingerprints.ranges
    assert [one.end for one in ranges] == sorted({one.end for one in ranges})
    assert sum(one.messages for one in ranges) == 200
    made.index.abandon()


def test_a_memory_that_cannot_be_written_stops_the_put(followed):
    followed.write(5)
    disk = FaultDisk()
    dispatcher = followed.dispatcher(disk=disk)
    disk.fail("sync", error=errno.ENOSPC)
    with pytest.raises(DiskFull):
        dispatcher.run_once()
    assert len(followed.index.query("orders", "k1")) == 0
    assert dispatcher.run_once().messages == 5
    followed.check()


def test_lag_is_bytes_and_seconds_behind_the_newest_message(followed):
    followed.write(50)
    dispatcher = followed.dispatcher(round_bytes=1)
    dispatcher.run_once()
    followed.write(250)
    behind = dispatcher.lag()
    assert behind.end_offset == followed.writer.next_offset
    assert behind.bytes == followed.writer.next_offset - dispatcher.position > 0
    last = max(entry.offset for entry in scan(followed.path).entries if entry.offset < dispatcher.position)
    number = next(int(e.key[4:]) for e in scan(followed.path).entries if e.offset == last and e.key.startswith("own-"))
    assert behind.seconds == pytest.approx((299 - number) * 0.02)
    list(rounds(dispatcher))
    assert (dispatcher.lag().bytes, dispatcher.lag().seconds) == (0, 0.0)
    followed.index.flush()
    followed.write(50)
    assert followed.dispatcher().lag().seconds == pytest.approx(1.0)
