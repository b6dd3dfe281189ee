"""Times without a zone are those of the clocks of --time-zone, also where the clocks change."""

import datetime
import json
import random
import zoneinfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tiered_index.base.units import MAX_TIMESTAMP_MS
from tiered_index.connectors.documents import times_in, with_times
from tiered_index.connectors.files.rows.mapping import RowMapping
from tiered_index.connectors.files.rows.zone import TimeZone, UnclearTimes
from tiered_index.errors import InvalidArgument
from tiered_index.format.topic_documents import TopicDocument

EPOCH = datetime.datetime(1970, 1, 1)
# with changes of an hour, of half an hour, of a day (a day that was left out), in Ramadan, and none
ZONES = ("Europe/Berlin", "America/New_York", "Australia/Lord_Howe", "Pacific/Apia", "Africa/Casablanca", "Etc/GMT+5")


def by_zoneinfo(local_ms, zone):
    """Return the epoch milliseconds of a time of the clocks, and whether they show it twice, or leave it out."""
    moment = (EPOCH + datetime.timedelta(milliseconds=local_ms)).replace(tzinfo=zone)
    first, second = moment.utcoffset(), moment.replace(fold=1).utcoffset()
    return local_ms - int(first.total_seconds()) * 1000, first > second, first < second


@pytest.mark.parametrize("name", ZONES)
def test_times_of_clocks_are_those_of_zoneinfo(name):
    zone, rng = zoneinfo.ZoneInfo(name), random.Random(name)
    begin, end = (int((datetime.datetime(year, 1, 2) - EPOCH).total_seconds()) for year in (1970, 2060))
    times = [rng.randrange(begin, end) * 1000 for _ in range(3000)]
    offsets = {
        second: zone.utcoffset(EPOCH + datetime.timedelta(seconds=second)) for second in range(begin, end, 86_400)
    }
    days = [day for day in offsets if offsets[day] != offsets.get(day + 86_400, offsets[day])]
    times += [(day + rng.randrange(-90_000, 180_000)) * 1000 + rng.randrange(1000) for day in days for _ in range(40)]
    times += [MAX_TIMESTAMP_MS - 200 * 86_400_000 * n for n in range(5)]
    wanted = [by_zoneinfo(time, zone) for time in times]
    zone = TimeZone(name)
    pieces = [zone.epoch_ms(np.array(times[at : at + 500], np.int64)).tolist() for at in range(0, len(times), 500)]
    assert [time for piece in pieces for time in piece] == [time for time, _, _ in wanted]
    assert zone.unclear == (sum(doubled for _, doubled, _ in wanted), sum(missing for _, _, missing in wanted))
    assert (zone.unclear != UnclearTimes()) == (name != "Etc/GMT+5")


def test_a_time_out_of_range_stays_so():
    beyond = np.array([-(2**62), -1, MAX_TIMESTAMP_MS + 86_400_000, 2**62], np.int64)
    assert ((times := TimeZone("Asia/Tokyo").epoch_ms(beyond)) < 0).tolist() == [True, True, False, False]
    assert (times[2:] > MAX_TIMESTAMP_MS).all()


@pytest.mark.parametrize("name", ["Europe/Berlim", "Europe", "../etc", "+02:00", "", "/etc/localtime", "a\0b"])
def test_an_unknown_zone_is_refused(name):
    with pytest.raises(InvalidArgument, match="is no time zone that this system knows: give a name such as Europe/B"):
        TimeZone(name)


SUMMER = datetime.datetime(2026, 7, 1, 12, 30, 15)
# the values of a time, and the hour of UTC with --time-zone Europe/Berlin
VALUES = {
    "2026-07-01T12:30:15": 10,
    "2026-07-01 12:30:15.000": 10,
    "2026-07-01T12:30:15Z": 12,
    "2026-07-01T12:30:15-04:00": 16,
    "1.7.2026 12:30:15": 10,
    "01/Jul/2026:12:30:15": 10,
    "01/Jul/2026:12:30:15 +0000": 12,
    1782909015: 12,
    "1782909015": 12,
}


def test_only_a_time_without_a_zone_is_of_the_clocks():
    def mapping():
        return RowMapping(("k",), "at", "s", zone=TimeZone("Europe/Berlin"))

    def hour(time_ms):
        assert time_ms % 3_600_000 == 30 * 60_000 + 15_000
        return time_ms // 3_600_000 % 24

    for value, wanted in VALUES.items():
        assert hour(mapping().time_ms(value)) == hour(mapping().times_ms([value] * 2)[1]) == wanted, value
        assert (with_value := mapping()).times_ms([value]) is not None
        assert with_value.has_zoneless == (wanted == 10)
    texts = [value for value in VALUES if isinstance(value, str) and "-" in value]
    assert [*map(hour, mapping().times_ms(texts))] == [VALUES[text] for text in texts]
    naive = pa.array([SUMMER] * 2)
    for unit in ("s", "ms", "us", "ns"):
        for zone, wanted in ((None, 10), ("UTC", 12), ("Asia/Tokyo", 12)):
            assert [*map(hour, mapping().times_ms(naive.cast(pa.timestamp(unit, zone))))] == [wanted] * 2
    assert mapping().times_ms(naive.cast(pa.date32())).tolist() == [1_782_856_800_000] * 2


# shown twice, left out, and one before each
CLOCKS = ["2026-10-25T02:30:00", "2026-10-25T01:30:00", "2026-03-29T02:30:00", "2026-03-29T01:30:00"]
UTC = [1_792_888_200_000, 1_792_884_600_000, 1_774_747_800_000, 1_774_744_200_000]


@pytest.mark.parametrize("form", ["ndjson", "csv", "one by one", "parquet", "parquet with a null", "arrow"])
def test_unclear_times_are_counted_once_in_each_form(tmp_path, form):
    rows = [{"k": f"k{n}", "at": at} for n, at in enumerate(CLOCKS)]
    path = tmp_path / f"a.{form.partition(' ')[0]}"
    if form in ("ndjson", "one by one"):
        # a key that is a list is read one by one, after its time was read with the others
        rows = [{**row, "k": [row["k"]]} for row in rows] if form == "one by one" else rows
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    elif form == "csv":
        path.write_text("".join(f"{k},{at}\n" for k, at in [("k", "at"), *(row.values() for row in rows)]))
    else:
        rows += [{"k": "bad", "at": None}] if "null" in form else []
        table = pa.Table.from_pylist(rows)
        table = table.set_column(1, "at", table["at"].cast(pa.timestamp("us")))
        if form == "arrow":
            with pa.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        else:
            pq.write_table(table, path)
    fields = ("--topic", "t", "--key", "k", "--time", "at", "--skip-bad", "--time-zone", "Europe/Berlin")
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects")
    dry = run_here("ingest", path, *fields, *where, "--dry-run", "--json").document
    done = run_here("ingest", path, *fields, *where)
    assert "1 time that the clocks of Europe/Berlin show twice, when they are put back: the first one" in done.err
    assert "1 time that the clocks of Europe/Berlin leave out: read as if they had not been put forward" in done.err
    assert (dry["time_zone"], dry["doubled_times"], dry["missing_times"]) == ("Europe/Berlin", 1, 1)
    for number, time_ms in enumerate(UTC):
        (item,) = run_here("query", "t", f"k{number}", *where, "--json").document["items"]
        assert item["timestamp_ms"] == time_ms


def test_the_zone_is_that_of_earlier_runs_until_another_is_given(tmp_path):
    where = ("--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects")
    new = ("--root", tmp_path / "new-root", "--storage", f"file://{tmp_path}/new")
    fields = ("--topic", "t", "--key", "k", "--time", "at")

    def hour(number, *options, index=where, text="2026-07-01T12:00:00"):
        (tmp_path / f"{number}.ndjson").write_text(json.dumps({"k": f"k{number}", "at": text}) + "\n")
        done = run_here("ingest", f"{tmp_path}/{number}.ndjson", *fields, *options, *index)
        assert done.code == 0, done.err
        (item,) = run_here("query", "t", f"k{number}", *index, "--json").document["items"]
        return item["timestamp_ms"] // 3_600_000 % 24, done.err

    assert hour(0) == (12, "")
    # no time of this run needs the zone, so that it is not that of later runs
    assert hour(1, "--time-zone", "Asia/Tokyo", text="2026-07-01T12:00:00Z")[0] == 12
    assert hour(2)[0] == 12
    assert hour(3, "--time-zone", "Europe/Berlin", "--archive")[0] == 10
    told = "times without a zone are of Europe/Berlin, as in an earlier run; --time-zone sets another zone"
    assert hour(4)[0] == 10 and told in hour(5)[1]
    at, told = hour(6, "--time-zone", "America/New_York", "--wait")
    assert at == 16 and "of America/New_York from now on. Earlier rows keep theirs, read in Europe/Berlin" in told
    assert hour(7)[0] == 16
    # an index of the archive knows it, too
    assert run_here("ingest", f"archive:{where[3]}", *new, "--skip-missing", "--wait").code == 0
    assert hour(8, index=new)[0] == 16
    assert hour(9, "--time-zone", "UTC")[0] == hour(10)[0] == 12


def test_units_and_zones_are_noted_for_each_path():
    document = TopicDocument.of("files", 1, {"store": "files:-/t/0"})
    for path, unit, zone in (
        ("at", None, "Europe/Berlin"),
        ("a/b", "s", None),
        ("at", "ms", "UTC"),
        ("at", None, None),
    ):
        facts = document.facts | {"times": with_times(document, path, unit, zone)}
        document = TopicDocument.of("files", 1, facts)
    assert times_in(document) == {"at": {"unit": "ms", "zone": "UTC"}, "a/b": {"unit": "s"}}
    assert times_in(None) == {} == with_times(None, "at", None, None)
