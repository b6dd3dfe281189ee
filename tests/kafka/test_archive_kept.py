"""The archive is verified, repaired, copied, expired and erased, and other systems open it as a table."""

import json
import random
import shutil
from pathlib import Path

import duckdb
import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.kafka.followed import archive, ingest
from tests.support.archived_records import encode_records
from tests.support.damage import flip
from tests.support.kafka_cluster import PARTITIONS, Producing
from tiered_index import IndexReader, IndexService, Retention, copy, erase, expire
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.connectors.documents import document_of
from tiered_index.connectors.kafka.archive import archived_files
from tiered_index.connectors.kafka.client.broker import kafka
from tiered_index.connectors.kafka.columns import RecordLists
from tiered_index.connectors.kafka.messages import KafkaMessages
from tiered_index.format.keys.spelling import key_text

COUNT, TIME_MS = 600, 1_700_000_000_000


RECORDS = [
    {
        "key": f"k{n}",
        "value": json.dumps({"order": {"id": n % 10}, "text": "x" * 2_000}),
        "headers": [("h", f"h{n}")],
        "partition": n % PARTITIONS,
        "timestamp": TIME_MS + 1_000 * n,
    }
    for n in range(COUNT)
]


@pytest.fixture(scope="module")
def folder(_cluster, tmp_path_factory):
    """The folder of an index with the archive of a topic, of several files a partition. The topic has its name."""
    folder = tmp_path_factory.mktemp("archived")
    _cluster.control(1)
    Producing(_cluster.servers).send(folder.name, RECORDS)
    place = {"root": folder / "root", "storage": (folder / "storage").as_uri()}
    with IndexService.open(**place, background=False, slots=97, items=5_000) as index:
        keys = ("key", "header:h", "json:order.id")
        with pytest.MonkeyPatch.context() as patched:
            # a segment ends with messages that the client returned together
            patched.setattr("tiered_index.connectors.kafka.client.broker.MOST_MESSAGES", 10)
            follower = archive(index, _cluster.servers, folder.name, segment_bytes=1 << 16, keys=keys)
        assert (follower.messages, follower.loss_count) == (COUNT, 0)
        index.seal()
        index.run_lifecycle()
    return folder


@pytest.fixture
def topic(folder):
    return folder.name


@pytest.fixture
def uri(folder, tmp_path):
    """A copy of the storage, which a test may change. Beside it is a copy of the root."""
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    marker = tmp_path / "root" / "tiered_index.json"
    marker.write_text(marker.read_text().replace(str(folder), str(tmp_path)))
    return (tmp_path / "storage").as_uri()


def run(*arguments, code=0):
    done = run_here(*arguments, "--json")
    assert done.code == code, done.err
    return done.document


def names(uri):
    with IndexReader.open(uri) as reader:
        return [segment.name for segment in reader.archived()]


def paths(uri):
    with IndexReader.open(uri) as reader:
        (topic,) = {segment.store.split("/")[1] for segment in reader.archived()}
        return archived_files(reader, topic)


def messages_of(uri, topic, key):
    with IndexReader.open(uri) as reader:
        return [
            (fetched.state, fetched.message and fetched.message.key)
            for fetched in reader.messages(topic, key, source=KafkaMessages(reader.segment_archives))
        ]


def test_duckdb_and_arrow_open_the_files_as_a_table(uri, tmp_path):
    files = paths(uri)
    assert len(files) > PARTITIONS
    table = f"read_parquet({files}, hive_partitioning = false)"
    rows = duckdb.sql(f'select key, value, partition, "offset", headers from {table}').fetchall()
    wanted = [
        (
            record["key"].encode(),
            record["value"].encode(),
            n % PARTITIONS,
            n // PARTITIONS,
            record["headers"][0][1].encode(),
        )
        for n, record in enumerate(RECORDS)
    ]
    assert sorted((*row[:4], row[4][0]["value"]) for row in rows) == sorted(wanted)
    # a condition on offsets reads the row groups that have them
    few = duckdb.sql(f'select count(*) from {table} where "offset" between 10 and 19').fetchall()
    assert few == [(10 * PARTITIONS,)]
    # and is exported
    duckdb.read_parquet(files, hive_partitioning=False).filter("partition = 1").write_parquet(f"{tmp_path}/one.parquet")
    assert pq.read_table(tmp_path / "one.parquet").num_rows == COUNT // PARTITIONS
    assert pq.read_table(files).num_rows == COUNT


def test_verify_finds_damage_anywhere_and_a_copy_repairs_it(uri, tmp_path):
    copied = (tmp_path / "copied").as_uri()
    copy(uri, copied)
    assert sorted(names(copied)) == sorted(names(uri))
    assert run("verify", "--deep", "--storage", copied)["findings"] == []
    # a row group, the checksums, the footer
    for path, share in zip(paths(uri), (0.3, 0.6, 0.99), strict=False):
        flip(Path(path), int(Path(path).stat().st_size * share))
    report = run("verify", "--deep", "--storage", uri, code=1)
    assert {finding["file"] for finding in report["findings"]} == set(names(uri)[:3])
    # what a lookup reads first is checked without the content
    report = run("verify", "--storage", uri, code=1)
    assert {finding["file"] for finding in report["findings"]} >= set(names(uri)[1:3])
    repaired = run("verify", "--deep", "--repair", "--from", copied, "--yes", "--storage", uri)
    assert (repaired["status"], len(repaired["repairs"])) == ("repaired", 3)
    assert run("verify", "--deep", "--storage", uri)["findings"] == []
    assert pq.read_table(paths(uri)).num_rows == COUNT


@pytest.mark.parametrize(("key", "count"), [("h7", 1), ("7", COUNT // 10)])
def test_a_record_is_erased_by_any_of_its_keys_and_certified(uri, tmp_path, topic, key, count):
    before = names(uri)
    certificate = erase(uri, topic, keys=key, yes=True, now=True, grace_s=0)
    assert (certificate.messages_erased, certificate.segment_problems) == (count, ())
    assert certificate.segments_remaining == ()
    assert 0 < certificate.segments_rewritten == len(set(names(uri)) - set(before))
    table = pq.read_table(paths(uri)).to_pylist()
    assert len(table) == COUNT - count
    assert not [row for row in table if key in (row["key"].decode(), row["headers"][0]["value"].decode())]
    with IndexReader.open(uri) as reader:
        facts = [(segment.rows, segment.times) for segment in reader.archived()]
    columns = [pq.read_table(path)["timestamp"].cast("int64").to_pylist() for path in paths(uri)]
    assert facts == [(len(times), (times[0], times[-1])) for times in columns]
    assert messages_of(uri, topic, key) == []
    assert messages_of(uri, topic, "k8") == [("archived", b"k8")]
    assert run("verify", "--deep", "--storage", uri)["findings"] == []
    # the bytes are gone, too
    assert sorted(map(Path, paths(uri))) == sorted((tmp_path / "storage").rglob("*.parquet"))
    with IndexReader.open(uri) as reader:
        source = KafkaMessages(reader.segment_archives)
        assert source.at(topic, 7 % PARTITIONS, 7 // PARTITIONS).state == "erased"
        # its range of offsets stays archived
        assert {segment.start for segment in reader.archived()} == {int(name.split("/")[2]) for name in before}
        assert sum(segment.rows for segment in reader.archived()) == COUNT - count


def test_a_key_brings_and_erases_only_records_of_its_form(servers, producing, tmp_path):
    """Only bytes that are no plain text share a key, with the text of their digits."""
    draw = random.Random(94)
    data = [b"order", b"0x6f72646572", b"0X6F72646572", b"a\tb", b"0x610962", b"0x610962".upper()]
    data += [draw.randbytes(length) for length in (1, 2, 8, 16) for _ in range(4)]
    data += [f"0x{each.hex()}".encode() for each in data[-16:]]
    offsets = dict[str, list[int]]()
    for offset, each in enumerate(data):
        offsets.setdefault(key_text(each), []).append(offset)
    producing.send("forms", [{"key": each, "value": "{}", "partition": 0} for each in data])
    uri = (tmp_path / "storage").as_uri()
    with IndexService.open(root=tmp_path / "root", storage=uri, background=False, slots=97, items=500) as index:
        archive(index, servers, "forms")
        index.seal()
        index.run_lifecycle()

    def brought():
        with IndexReader.open(uri) as reader:
            source = KafkaMessages(reader.segment_archives)
            of_keys = {key: reader.messages("forms", key, source=source).messages for key in offsets}
        assert all(data[each.item.offset] == each.message.key for fetched in of_keys.values() for each in fetched)
        return {key: sorted(each.item.offset for each in fetched) for key, fetched in of_keys.items()}

    assert brought() == offsets
    for key in ("0x6f72646572", "0x610962", key_text(data[-1])):
        certificate = erase(uri, "forms", keys=key, yes=True, now=True, grace_s=0)
        assert (certificate.messages_erased, certificate.entries_removed) == (len(offsets[key]),) * 2
        offsets[key] = []
        assert brought() == offsets


def test_a_partition_or_a_time_is_erased(uri, tmp_path, topic):
    erase(uri, topic, queue_id=1, before_ms=TIME_MS + 299_500, yes=True, now=True, grace_s=0)
    rows = pq.read_table(paths(uri)).to_pylist()
    left = {(row["partition"], row["offset"]) for row in rows}
    assert left == {(n % PARTITIONS, n // PARTITIONS) for n in range(COUNT) if n % PARTITIONS != 1 or n >= 300}
    certificate = erase(uri, topic, yes=True, now=True, grace_s=0)
    assert (certificate.messages_erased, pq.read_table(paths(uri)).num_rows) == (len(left), 0)


def test_an_erasure_goes_on_at_no_damage(uri, tmp_path, topic):
    flip(Path(paths(uri)[0]), 1_000)
    certificate = erase(uri, topic, keys="none", yes=True, now=True)
    assert [problem.startswith(names(uri)[0]) for problem in certificate.segment_problems] == [True]
    assert certificate.segments_remaining == (names(uri)[0],)


def test_segments_expire_and_are_counted(uri, topic, servers, tmp_path):
    size = sum(Path(path).stat().st_size for path in paths(uri))
    (row,) = [
        row for row in run("topics", "--by", "topic,state", "--storage", uri)["rows"] if row["state"] == "archived"
    ]
    assert row["bytes"] == size
    expire(uri, Retention(segments_age_s=1), yes=True, clock=ManualClock(SystemClock().now_ms() + 10_000))
    assert names(uri) == []
    assert messages_of(uri, topic, "k7") == [("expired", None)]
    # and are not archived again
    with IndexService.open(root=tmp_path / "root", storage=uri, background=False) as index:
        assert archive(index, servers, topic).archiving.archived == 0


ENTRY = "queue_id", "offset", "key_hash", "fingerprint", "size", "timestamp_ms"


def entries_of(uri):
    """All entries of an index, each as the values of `ENTRY`."""
    with IndexReader.open(uri) as reader, reader.export() as batches:
        return sorted(tuple(row[name] for name in ENTRY) for batch in batches for row in batch.to_pylist())


def test_an_index_of_the_archive_is_the_one_that_was_followed_and_goes_on(uri, topic, servers, tmp_path):
    new = (tmp_path / "new").as_uri()
    built = run("ingest", f"archive:{uri}", "--storage", new)
    assert built["entries"] == 3 * COUNT and not built["skipped"]
    assert entries_of(new) == entries_of(uri)
    again = run("ingest", f"archive:{uri}", "--storage", new)
    assert (again["entries"], again["messages"]) == (0, 0)
    with IndexReader.open(uri) as old:
        stores = old.segments().stores
        positions = {name: at for name, at in old.log_state.positions.items() if name.startswith("kafka")}
    for store in stores:
        assert run("ingest", f"archive:{uri}", "--dry-run", "--store-name", store)["status"] == "same"
    assert "several stores" in run_here("ingest", f"archive:{uri}", "--dry-run").err
    Producing(servers).send(topic, [{"key": "later", "value": "{}", "partition": 0}])
    with IndexService.open(root=tmp_path / "root-2", storage=new, background=False) as index:
        told = {name: at for name, at in index.durable_positions().items() if name.startswith("kafka")}
        assert {name: told.get(name) for name in positions if "epoch" not in name} == {
            name: at for name, at in positions.items() if "epoch" not in name
        }
        follower = ingest(index, servers, topic, keys=("key", "header:h", "json:order.id"))
        assert (follower.messages, follower.loss_count) == (1, 0)
        assert len(index.query(topic, "later").items) == 1


def test_a_record_without_a_time_has_that_of_its_upload_for_an_index_of_the_archive_and_an_erasure(tmp_path):
    uri, new, lists = (tmp_path / "storage").as_uri(), (tmp_path / "new").as_uri(), RecordLists()
    lists.add([kafka.Message(topic="t", partition=0, offset=0, key=b"k", value=b"v", timestamp=(0, 0))])
    with IndexService.open(root=tmp_path / "root", storage=uri, background=False, slots=97, items=5_000) as index:
        index.describe_topics(["t"], document_of("kafka", {"cluster": "c", "keys": ["key"]}))
        assert index.archive_columns("kafka:c/t/0", 0, 1, encode_records(("t", 0), lists.table(), ["key"]))
        (segment,) = index.archived()
    uploaded_ms = segment.published_ms // 1_000 * 1_000
    assert run("ingest", f"archive:{uri}", "--storage", new)["entries"] == 1
    with IndexReader.open(new) as reader:
        assert [item.timestamp_ms for item in reader.query("t", "k").items] == [uploaded_ms]
    for before_ms, count in ((uploaded_ms, 0), (uploaded_ms + 1_000, 1)):
        assert erase(uri, "t", keys="k", before_ms=before_ms, yes=True, now=True).messages_erased == count


def test_what_was_erased_stays_out_of_an_index_of_the_archive_and_damage_is_said(uri, topic, tmp_path):
    new, other = (tmp_path / "new").as_uri(), (tmp_path / "other").as_uri()
    erase(uri, topic, keys="k7", yes=True)
    built = run("ingest", f"archive:{uri}", "--storage", new)
    assert (built["expired"], built["entries"]) == (1, 3 * COUNT - 1)
    assert entries_of(new) == entries_of(uri)
    flip(Path(paths(uri)[0]), 1_000)
    damaged = run_here("ingest", f"archive:{uri}", "--storage", other, "--strict")
    assert (damaged.code, "CRC32" in damaged.err) == (4, True)
    passed = run("ingest", f"archive:{uri}", "--storage", other, "--skip-corrupt")
    (lost,) = passed["skipped"]
    lacks = {*entries_of(uri)} - {*entries_of(other)}
    assert {offset for _, offset, *_ in lacks} == {*range(lost["begin"], lost["end"])}
    assert len({partition for partition, *_ in lacks}) == 1


@pytest.mark.parametrize("number", [0, 1])
def test_a_file_that_was_given_up_is_never_passed_over_unsaid(uri, tmp_path, number):
    with IndexReader.open(uri) as reader:
        lost = list(reader.segments().of(reader.segments().stores[0]))[number]
    flip(Path(paths(uri)[number]), 1_000)
    run("recover", "--storage", uri, "--lost", lost.name)
    where = "ingest", f"archive:{uri}", "--storage", (tmp_path / "new").as_uri()
    assert "no archived file has offsets" in run_here(*where).err
    (skipped,) = run(*where, "--skip-missing")["skipped"]
    assert (skipped["begin"], skipped["end"]) == (lost.start, lost.end)
