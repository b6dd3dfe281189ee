"""A file whose journal had lost its end silently lost those entries, even if a younger file proved that it had been
whole.

Answers were called complete, positions were ahead of the entries, and the life cycle made the loss permanent.
"""

from __future__ import annotations

import struct

import pytest

from tests.regressions.conftest import ASK
from tests.support.disk_faults import FaultDisk
from tiered_index.errors import CorruptFile

NOW_MS = 1_700_000_000_000
LANES = {"main": NOW_MS, "quarantine": 5_000}


def put(service, first, last, begin_ms=NOW_MS):
    for number in range(first, last + 1):
        service.put("t", 0, "k", number, 1, begin_ms + number * 1000, source="s", source_position=number)
    service.flush()


def offsets(result):
    return sorted(item.offset for item in result)


def borders(journal):
    """Return the end of each record of a journal: open, batch, batch, seal."""
    ends = [12]
    while ends[-1] < len(journal):
        (length,) = struct.unpack_from(">I", journal, ends[-1])
        ends.append(ends[-1] + 8 + length)
    return ends[1:]


DAMAGE = {
    "cut behind the first batch": lambda data, ends: data[: ends[1]],
    "cut within the second batch": lambda data, ends: data[: ends[1] + 20],
    "zeros from the second batch on": lambda data, ends: data[: ends[1]].ljust(len(data), b"\0"),
    "cut behind the open record": lambda data, ends: data[: ends[0]],
    "cut within the first batch": lambda data, ends: data[: ends[0] + 20],
}


@pytest.fixture(params=DAMAGE)
def damaged(request, open_index, tmp_path):
    """Return a function that leaves a root with a damaged file, and returns that file's paths and bytes.

    Messages 1..40 are in a sealed file of a lane, whose journal lost its end, and 41..50 in a younger file.
    """

    def make(lane="main", restarted=False):
        service = open_index()
        put(service, 1, 20, LANES[lane])
        put(service, 21, 40, LANES[lane])
        service.seal()
        if restarted:
            service.close()
            service = open_index()
        put(service, 41, 50, LANES[lane])
        service.abandon()
        folder = tmp_path / "root" / "unsealed"
        journal = next(path for path in folder.glob("*.journal") if b'"kind":"seal"' in path.read_bytes())
        data = journal.read_bytes()
        ends = borders(data)
        assert (len(ends), ends[-1]) == (4, len(data))
        journal.write_bytes(DAMAGE[request.param](data, ends))
        return {path: path.read_bytes() for path in (journal, journal.with_suffix(".index"))}

    return make


@pytest.mark.parametrize("restarted", [False, True])
@pytest.mark.parametrize("lane", LANES)
def test_what_a_journal_lost_is_damage_where_a_younger_file_is(open_index, open_reader, damaged, lane, restarted):
    files = damaged(lane, restarted)
    file_id = next(iter(files)).stem
    for _ in range(2):
        service = open_index()
        for ask in ASK.values():
            with pytest.raises(CorruptFile, match=file_id):
                ask(service)
        result = service.query("t", "k", max_count=1000, allow_partial=True)
        assert (result.status, offsets(result)) == ("partial", list(range(41, 51)))
        assert [report.file for report in result.failed] == [file_id]
        service.seal()
        service.run_lifecycle()
        service.run_lifecycle()
        assert {path: path.read_bytes() for path in files if path.exists()} == files
        assert file_id not in {o.file_id for o in service.log_state.objects.values()}
        with open_reader() as reader:
            promised = reader.log_state.positions.get("s", 0)
            assert set(range(1, promised + 1)) <= set(offsets(reader.query("t", "k", max_count=1000)))
        with pytest.raises(CorruptFile, match=file_id):
            service.query("t", "k")
        service.close()


def test_a_reader_beside_it_says_so_too(open_reader, damaged):
    files = damaged()
    reader = open_reader("root")
    with pytest.raises(CorruptFile, match=next(iter(files)).stem):
        reader.query("t", "k")
    result = reader.query("t", "k", max_count=1000, allow_partial=True)
    assert (result.status, offsets(result)) == ("partial", list(range(41, 51)))


# The marks of a crash or a failed write are no damage


def test_the_newest_files_journal_may_end_early(open_index, open_reader, tmp_path):
    service = open_index()
    put(service, 1, 20)
    service.seal()
    put(service, 21, 30)
    put(service, 31, 40)
    service.abandon()
    journal = next(
        path for path in (tmp_path / "root" / "unsealed").glob("*.journal") if b'"kind":"seal"' not in path.read_bytes()
    )
    data = journal.read_bytes()
    journal.write_bytes(data[: borders(data)[1] + 20])
    with open_reader("root") as reader:
        assert offsets(reader.query("t", "k")) == list(range(1, 31))
    service = open_index()
    result = service.query("t", "k")
    assert (result.status, offsets(result)) == ("complete", list(range(1, 31)))
    assert service.durable_position("s") == 30


@pytest.mark.parametrize("nth", [1, 2])
@pytest.mark.parametrize("operation", ["pwrite", "sync"])
@pytest.mark.parametrize(("failed", "last"), [("write", 40), ("write", 41), ("seal", 40)])
def test_a_write_or_seal_that_failed_is_no_damage(open_index, open_reader, operation, nth, failed, last):
    disk = FaultDisk()
    service = open_index(disk=disk)
    put(service, 1, 20)
    disk.fail(operation, nth=nth, torn=True)
    if failed == "seal":
        service.seal()
    put(service, 21, 40)
    assert len(service.files()) == 2  # after a failed write the first file accepts no more entries
    if last == 41:
        service.seal()
        put(service, 41, 41)
    service.abandon()
    wanted = list(range(1, last + 1))
    with open_reader("root") as reader:
        assert offsets(reader.query("t", "k")) == wanted
    for _ in range(2):
        service = open_index()
        result = service.query("t", "k")
        assert (result.status, offsets(result)) == ("complete", wanted)
        assert service.durable_position("s") == last
        service.abandon()
