"""`ingest archive:` copies Kafka's records into the archive of the new index: the old one can be deleted."""

import json
import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.integration.cli.command_lines import run_here
from tests.kafka.followed import archive, archived, ingest
from tests.support.damage import flip
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService, Retention, config, erase, expire
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.connectors.kafka.archive import archived_files
from tiered_index.connectors.kafka.messages import KafkaMessages

TIME_MS, COUNT = 1_700_000_000_000, 40


def records(begin, end, partition=0):
    """Return records of which every fifth has no key."""
    for number in range(begin, end):
        yield {
            "key": f"k{number}" if number % 5 else None,
            "value": json.dumps({"user": f"u{number % 7}"}),
            "headers": [("h", b"\xff")],
            "partition": partition,
            "timestamp": TIME_MS + 1_000 * number,
        }


class Old:
    """An index of a topic with several archived files, and the URI of an index to be made of its archive."""

    def __init__(self, folder: Path, servers: str, topic: str) -> None:
        self.folder, self.servers, self.topic = folder, servers, topic
        self.uri, self.new = (folder / "old").as_uri(), (folder / "new").as_uri()

    def opened(self, name: str = "old") -> IndexService:
        where = {"root": self.folder / f"{name}-root", "storage": (self.folder / name).as_uri()}
        return IndexService.open(**where, background=False, slots=97, items=5_000)

    @staticmethod
    def upload(index: IndexService) -> None:
        """Publish all entries and positions, which an index of the archive is made by."""
        index.seal()
        index.run_lifecycle()

    def run(self, *more: object, code: int = 0) -> dict:
        done = run_here("ingest", f"archive:{self.uri}", "--storage", self.new, "--json", *more)
        assert done.code == code, done.err
        return done.document

    def ids(self, uri: str) -> list[str]:
        with IndexReader.open(uri) as reader:
            return archived_files(reader, self.topic)


@pytest.fixture
def old(servers, producing, topic, tmp_path, monkeypatch):
    monkeypatch.setattr("tiered_index.connectors.kafka.client.broker.MOST_MESSAGES", 10)
    producing.send(topic, records(0, COUNT))
    old = Old(tmp_path, servers, topic)
    with old.opened() as index:
        follower = archive(index, servers, topic, segment_bytes=1_000)
        assert (follower.messages, follower.archiving.archived) == (COUNT, 4)
        old.upload(index)
    return old


def columns(files):
    return sorted(pq.read_table(files).to_pylist(), key=lambda row: (row["partition"], row["offset"]))


def test_the_records_outlive_the_old_index_and_the_broker(old, cluster, producing, topic):
    before = columns(old.ids(old.uri))
    with IndexReader.open(old.uri) as reader:
        facts = [(part.start, part.end, part.rows, part.times, part.published_ms) for part in reader.archived()]
    built = old.run()
    # also those without a key
    assert (built["copied"], built["messages"], built["entries"]) == (COUNT, COUNT, COUNT - COUNT // 5)
    assert old.run()["copied"] == 0
    shutil.rmtree(old.folder / "old")
    cluster.trim(topic, 0, COUNT)
    assert columns(old.ids(old.new)) == before
    with IndexReader.open(old.new) as reader:
        assert facts == [(part.start, part.end, part.rows, part.times, part.published_ms) for part in reader.archived()]
        source = KafkaMessages(reader.segment_archives)
        (fetched,) = reader.messages(topic, "k7", source=source)
        assert (fetched.state, fetched.message.key, fetched.message.headers) == ("archived", b"k7", (("h", b"\xff"),))
        assert [source.at(topic, 0, offset).state for offset in (5, COUNT - 1)] == ["archived"] * 2
    # the next run archives what is new, and misses nothing
    producing.send(topic, records(COUNT, COUNT + 5))
    with old.opened("new") as index:
        later = archive(index, old.servers, topic)
        assert (later.messages, later.loss_count, later.archiving.archived) == (5, 0, 1)
        assert [record.offset for record in archived(index)] == [*range(COUNT + 5)]


@pytest.mark.parametrize("at_once", [1, 256])
@pytest.mark.parametrize(
    "calls", [range(20, 60, 5), pytest.param(range(1, 100), marks=pytest.mark.slow)], ids=["some", "all"]
)
def test_a_run_whose_storage_fails_at_any_call_continues_with_every_record_once(
    old, monkeypatch, calls, at_once, tmp_path
):
    monkeypatch.setattr("tiered_index.connectors.archive.archiver._NAMED", at_once)
    open_storage, whole = config.open_storage, columns(old.ids(old.uri))
    ends = set[int]()
    for nth in calls:
        old.new = (tmp_path / str(nth) / "new").as_uri()
        more = ("--root", tmp_path / str(nth) / "root", "--wait")

        def mortal(uri, *, new=old.new, nth=nth, **options):
            storage = FaultStorage(open_storage(uri, **options))
            if uri == new:
                storage.fail("*", nth=nth, times=None)
            return storage

        with monkeypatch.context() as patched:
            patched.setattr(config, "open_storage", mortal)
            arguments = ("ingest", f"archive:{old.uri}", "--storage", old.new, *more, "--patience", 0)
            ends.add(run_here(*arguments).code)
        shutil.rmtree(tmp_path / str(nth) / "new" / "lease%", ignore_errors=True)  # as if it had ended
        old.run(*more)
        assert columns(old.ids(old.new)) == whole, nth
        with IndexReader.open(old.new) as reader:
            assert len(reader.query(old.topic, "k7").items) == 1
    assert ends - {0} == {3}


@pytest.mark.parametrize("what", ["key", "topic", "partition"])
def test_erased_records_are_not_copied_and_stay_known_as_erased(old, topic, what):
    request = {"key": {"keys": "k7"}, "topic": {"before_ms": TIME_MS + 7_000}, "partition": {"queue_id": 0}}[what]
    erase(old.uri, topic, **request, yes=True)
    gone = {"key": {7}, "topic": {*range(7)}, "partition": {*range(COUNT)}}[what]
    assert old.run()["copied"] == COUNT - len(gone)
    assert {row["offset"] for row in columns(old.ids(old.new))} == {*range(COUNT)} - gone
    with IndexReader.open(old.new) as reader:
        source = KafkaMessages(reader.segment_archives)
        states = {offset: source.at(topic, 0, offset).state for offset in range(COUNT)}
    assert {offset for offset, state in states.items() if state == "erased"} == gone
    assert {offset for offset, state in states.items() if state == "archived"} == {*range(COUNT)} - gone
    # also if the old archive has lost them meanwhile
    erase(old.uri, topic, **request, yes=True, now=True, grace_s=0)
    old.new = (old.folder / "later").as_uri()
    old.run()
    with IndexReader.open(old.new) as reader:
        source = KafkaMessages(reader.segment_archives)
        assert {offset for offset in range(COUNT) if source.at(topic, 0, offset).state == "erased"} == gone


def test_expired_records_stay_known_as_expired(old, servers, producing, topic):
    expire(old.uri, Retention(segments_age_s=1), yes=True, clock=ManualClock(SystemClock().now_ms() + 10_000))
    producing.send(topic, records(COUNT, COUNT + 5))
    with old.opened() as index:
        archive(index, servers, topic)
    assert old.run()["copied"] == 5
    with IndexReader.open(old.new) as reader:
        source = KafkaMessages(reader.segment_archives)
        states = [source.at(topic, 0, offset).state for offset in (0, COUNT - 1, COUNT, COUNT + 4)]
    assert states == ["expired", "expired", "archived", "archived"]


def test_only_the_records_of_selected_topics_are_copied(old, servers, producing, topic):
    producing.send(other := f"{topic}.other", records(0, 3))
    with old.opened() as index:
        archive(index, servers, topic, other)
    assert old.run("--topics", other)["copied"] == 3
    assert old.ids(old.new) == []


def test_records_that_were_lost_for_the_archive_are_not_left_out_unsaid(old, cluster, servers, producing, topic):
    producing.send(topic, records(COUNT, COUNT + 20))
    with old.opened() as index:
        ingest(index, servers, topic)
        cluster.trim(topic, 0, COUNT + 15)
        assert archive(index, servers, topic).loss_count == 1
    refused = run_here("ingest", f"archive:{old.uri}", "--storage", old.new)
    assert (refused.code, f"no archived file has offsets {COUNT} to {COUNT + 14}" in refused.err) == (4, True)
    old.new = (old.folder / "later").as_uri()
    built = old.run("--skip-missing")
    assert [(gap["begin"], gap["end"]) for gap in built["skipped"]] == [(COUNT, COUNT + 15)]
    assert built["copied"] == COUNT + 5
    # and lookups in the new index name them
    with IndexReader.open(old.new) as reader:
        (lost,) = reader.query(topic, f"k{COUNT + 1}").lost
        assert f"offsets {COUNT} to {COUNT + 14}" in lost.reason


def test_a_file_that_can_not_be_read_is_named_and_the_others_are_taken_over(old, topic):
    damaged = old.ids(old.uri)[1]
    flip(Path(damaged), 500)
    built = old.run(code=1)
    assert [(gap["begin"], gap["end"]) for gap in built["skipped"]] == [(10, 20)]
    assert (built["copied"], built["messages"]) == (COUNT - 10, COUNT - 10)
    with IndexReader.open(old.new) as reader:
        assert [len(reader.query(topic, f"k{number}").items) for number in (9, 11, 21)] == [1, 0, 1]
        times = {"begin_ms": TIME_MS + 10_000, "end_ms": TIME_MS + 19_000}
        (lost,) = reader.query(topic, "k11", **times).lost
        assert "offsets 10 to 19" in lost.reason
        assert reader.query(topic, "k9", begin_ms=TIME_MS, end_ms=TIME_MS + 9_000).lost == ()
    for number, (more, code) in enumerate([(("--skip-corrupt",), 0), (("--strict",), 4)]):
        old.new = (old.folder / str(number)).as_uri()
        done = run_here("ingest", f"archive:{old.uri}", "--storage", old.new, *more)
        assert (done.code, Path(damaged).name.split("-")[0][:6] in done.err or code == 0) == (code, True), done.err
    both = run_here("ingest", f"archive:{old.uri}", "--storage", old.new, "--strict", "--skip-corrupt")
    assert (both.code, "--strict" in both.err) == (2, True)


def test_a_run_that_can_read_no_file_ends_with_4(old):
    gone, *rest = old.ids(old.uri)
    Path(gone).unlink()
    for file in rest:
        flip(Path(file), 500)
    assert len(old.run(code=4)["skipped"]) == 4


def test_a_key_that_was_added_later_is_one_of_the_new_index_also_for_records_that_only_the_archive_has(
    old, cluster, servers, producing, topic
):
    cluster.trim(topic, 0, COUNT - 10)
    producing.send(topic, records(COUNT, COUNT + 10))
    with old.opened() as index:
        added = archive(index, servers, topic, keys=("key", "u=json:user"))
        assert added.loss_count == 0
        old.upload(index)
    old.run()
    for uri in (old.uri, old.new):
        with IndexReader.open(uri) as reader:
            offsets = [item.offset for item in reader.query(topic, "u=u3").items]
            assert sorted(offsets) == [number for number in range(COUNT + 10) if number % 7 == 3]
            assert reader.query(topic, "u=u3").lost == ()
            source = KafkaMessages(reader.segment_archives)
            assert {message.state for message in reader.messages(topic, "u=u3", source=source)} == {"archived"}
    # the new index goes on with both keys
    producing.send(topic, records(COUNT + 10, COUNT + 20))
    with old.opened("new") as index:
        ingest(index, servers, topic, keys=("key",))
        assert len(index.query(topic, "u=u3").items) == len([n for n in range(COUNT + 20) if n % 7 == 3])


def test_what_neither_the_broker_nor_the_archive_has_for_an_added_key_is_named_by_the_new_index_too(
    old, cluster, servers, producing, topic
):
    producing.send(topic, records(COUNT, COUNT + 20))
    with old.opened() as index:
        ingest(index, servers, topic)
        cluster.trim(topic, 0, COUNT + 10)
        archive(index, servers, topic, keys=("key", "u=json:user"))
        (lost,) = index.query(topic, "u=u3").lost
        assert f"offsets {COUNT} to {COUNT + 9} can't be read any more for --key u=json:user" in lost.reason
        old.upload(index)
    assert "no archived file has offsets" in run_here("ingest", f"archive:{old.uri}", "--storage", old.new).err
    old.new = (old.folder / "later").as_uri()
    old.run("--skip-missing")
    with IndexReader.open(old.new) as reader:
        answer = reader.query(topic, "u=u3")
        assert [f"offsets {COUNT} to {COUNT + 9}" in lost.reason for lost in answer.lost] == [True]
        readable = [number for number in range(COUNT + 20) if number % 7 == 3 and not COUNT <= number < COUNT + 10]
        assert sorted(item.offset for item in answer.items) == readable
