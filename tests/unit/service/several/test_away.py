"""An index that does not answer, or whose log is damaged, delays no lookup in the others, and answers name it."""

import time

import pytest

from tests.server.conftest import serving
from tests.support.hanging import beside, until
from tests.support.several_indexes import Cluster, Watched, of, rows
from tiered_index import IndexReader
from tiered_index.base.clock import ManualClock
from tiered_index.config import IndexConfig
from tiered_index.errors import CorruptFile, InvalidArgument, StorageUnavailable
from tiered_index.storage.memory import MemoryStorage
from tiered_index.storage.opening import PrefixedStorage, open_storage

# time enough for an index in memory on a busy machine
SHORT_S = 2.0
RETRIES_S = 0.5


def check_partial(cluster, answer, away):
    """Check that an answer has all entries of the other indexes, and names the one that is away."""
    assert {report.source for report in answer.failed} == {away}
    assert answer.status == "partial"
    assert cluster.answers(answer) == cluster.expected([uri for uri in cluster.uris if uri != away])


def ask(reader, **how):
    return reader.query("t", "k", max_count=1000, allow_partial=True, **how)


@pytest.mark.parametrize("how", ["list", "prefix", "list in time"])
def test_one_hangs_at_the_opening(tmp_path, clock, how, monkeypatch):
    """The reader opens with the others. It reads the index as soon as that answers."""
    shared = Watched(MemoryStorage())
    cluster = Cluster(tmp_path)
    for name in ("a", "b"):
        below = PrefixedStorage(shared.inner, name)
        cluster.add(below.uri, rows(ord(name)), below)
    there, away = cluster.uris
    hang = shared.hang("get", name_prefix="b/checkpoint/")
    settings = {"storage_backend": shared}
    if how != "prefix":
        storages = {uri: PrefixedStorage(shared, uri[-1]) for uri in cluster.uris}
        monkeypatch.setattr(IndexConfig, "open_storage", lambda config, uri=None: storages[uri or config.storage])
        settings = {"storage": [away, there]}
    settings |= {"timeout_s": SHORT_S} if how == "list in time" else {"source_timeout_s": SHORT_S}
    with IndexReader.open(clock=clock, refresh_interval_s=10, **settings) as reader:
        assert reader.sources == (there,)
        check_partial(cluster, ask(reader), away)
        hang.release.set()
        until(lambda: clock.advance(2) or ask(reader).status == "complete")
        assert sorted(reader.sources) == cluster.uris
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


def test_lookups_do_not_wait_for_a_log_that_hangs(cluster, opened, clock):
    away = cluster.uris[1]
    with cluster.reader(clock=clock, refresh_interval_s=10, source_timeout_s=SHORT_S) as reader:
        hang = of(opened, away).hang("list", name_prefix="log/")
        clock.advance(11)
        with pytest.raises(StorageUnavailable, match=rf"{away} did not answer within {SHORT_S:g} s"):
            reader.query("t", "k")
        begun_s = time.monotonic()
        for number in range(40):
            clock.advance(11 if number % 8 == 0 else 0)
            check_partial(cluster, ask(reader), away)
        assert time.monotonic() - begun_s < 40 * SHORT_S / 2, "each waited"
        # freshness has only the indexes that were read
        assert {freshness.source for freshness in ask(reader).freshness} == {*cluster.uris} - {away}
        for _ in range(2):
            with pytest.raises(StorageUnavailable, match=away):
                reader.refresh()
        hang.release.set()
        until(lambda: clock.advance(2) or ask(reader).status == "complete")
        cluster.add(away, rows(70, 30, seconds=9))
        clock.advance(11)
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


@pytest.fixture
def hangs(opened):
    """Return a function that lets calls of storages hang until the test ends."""
    faults = []

    def hang(uri, operation, **how):
        faults.append(of(opened, uri).hang(operation, **how))

    yield hang
    for fault in faults:
        fault.release.set()


def test_an_index_whose_files_hang_is_asked_again_after_a_pause(cluster, opened, clock):
    """Its log answers at once, so without a pause each second lookup would wait for its files."""
    away = cluster.uris[1]
    with cluster.reader(clock=clock, refresh_interval_s=1000, source_timeout_s=0.5, cache_slot_groups=False) as reader:
        storage = of(opened, away)
        hang = storage.hang("get_range", times=None)
        check_partial(cluster, ask(reader), away)
        looks, reads = storage.calls("list"), storage.calls("get_range")
        for _ in range(3):
            clock.advance(0.3)
            check_partial(cluster, ask(reader), away)
            time.sleep(0.1)
        assert storage.calls("list") == looks
        hang.release.set()
        time.sleep(0.3)
        # what was asked for too late sends no further request
        assert storage.calls("get_range") == reads > 0
        clock.advance(0.2)
        until(lambda: ask(reader).status == "complete")
        assert storage.calls("list") == looks + 1


@pytest.fixture
def reading(monkeypatch):
    """Return a dict from URI to a call before each listing and whole GET of this storage, which may raise."""
    before = {}
    for name in ("get", "list"):
        real = getattr(MemoryStorage, name)

        def read(self, *args, real=real, **named):
            before.get(self.uri, lambda: None)()
            return real(self, *args, **named)

        monkeypatch.setattr(MemoryStorage, name, read)
    return before


def sources(answer):
    return {report.source for report in answer.failed}


def refused():
    time.sleep(RETRIES_S)
    raise StorageUnavailable("refused")


def test_refreshes_of_the_others_do_not_queue_behind_one_that_hangs(cluster, hangs, clock):
    away = cluster.uris[0]
    with cluster.reader(clock=clock, refresh_interval_s=10, source_timeout_s=SHORT_S, query_threads=1) as reader:
        hangs(away, "list", name_prefix="log/")
        for _ in range(2):
            clock.advance(11)
            assert sources(ask(reader)) == {away}
            assert isinstance(beside(reader.refresh)(), StorageUnavailable)


@pytest.mark.parametrize("since", ["the opening", "later"])
def test_an_index_that_refuses_after_retries_delays_only_one_lookup(cluster, reading, clock, since):
    away = cluster.uris[1]
    if since == "the opening":
        reading[away] = refused
    with cluster.reader(clock=clock, refresh_interval_s=10, source_timeout_s=SHORT_S) as reader:
        reading[away] = refused
        clock.advance(11)
        took = []
        for _ in range(6):
            begun = time.monotonic()
            clock.advance(0.01)
            assert sources(ask(reader)) == {away}
            took.append(time.monotonic() - begun)
        assert sum(took[1:]) < 4 * RETRIES_S, "more than one waited"


def test_one_index_twice_is_refused_even_if_it_does_not_answer(cluster, reading, clock):
    reading[cluster.uris[2]] = refused
    with pytest.raises(InvalidArgument, match="given twice"):
        cluster.reader([*cluster.uris, cluster.uris[2]], clock=clock)


@pytest.mark.parametrize("how", ["due", "asked"])
def test_logs_are_read_side_by_side_up_to_a_bound(cluster, opened, clock, how):
    with cluster.reader(clock=clock, refresh_interval_s=10, query_threads=2) as reader:
        for uri in cluster.uris:
            cluster.add(uri, rows(60, 30, seconds=9))
        hangs = [of(opened, uri).hang("get", name_prefix="log/") for uri in reader.sources]
        clock.advance(11)
        asking = beside(reader.refresh if how == "asked" else lambda: reader.query("t", "k", max_count=1000))
        assert hangs[0].entered.wait(30) and hangs[1].entered.wait(30)
        assert not hangs[2].entered.is_set()
        hangs[0].release.set()
        assert hangs[2].entered.wait(30) and not asking.ended(0)
        for hang in hangs:
            hang.release.set()
        assert not isinstance(asking(), BaseException)
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


def test_a_damaged_log_leaves_no_answer_complete_and_the_others_are_read(cluster, opened, clock):
    """Its new records may have answers. A partial answer has the entries that the reader already knows."""
    hurt = cluster.uris[1]
    with cluster.reader(clock=clock, refresh_interval_s=10) as reader:
        known, record = cluster.expected([hurt]), f"log/{reader._views[1].log_state.number + 1:020}"
        for uri in cluster.uris:
            cluster.add(uri, rows(64, 30, seconds=9))
        of(opened, hurt).corrupt("get", name_prefix=record, times=None)
        clock.advance(11)
        with pytest.raises(CorruptFile, match=record):
            reader.query("t", "k", max_count=1000)
        answer = ask(reader)
        assert (answer.status, [(r.source, r.file) for r in answer.failed]) == ("partial", [(hurt, record)])
        answers = cluster.answers(answer)
        of_hurt = [answer for answer in answers if answer.extra[0][1] == cluster.numbers[hurt]]
        assert of_hurt == known
        others = cluster.expected([uri for uri in cluster.uris if uri != hurt])
        assert [answer for answer in answers if answer not in of_hurt] == others
        of(opened, hurt).clear()
        clock.advance(2)
        assert cluster.answers(reader.query("t", "k", max_count=1000)) == cluster.expected()


def test_an_index_without_its_log_is_no_empty_folder(cluster):
    prefix = cluster.uris[0].rpartition("/")[0]
    MemoryStorage(prefix.removeprefix("memory://") + "/broken").put("epoch/00000000000000000001", b"x")
    with IndexReader.open(prefix) as reader:
        with pytest.raises(CorruptFile, match="log"):
            reader.query("t", "k")
        answer = ask(reader)
    assert [report.source for report in answer.failed] == [f"{prefix}/broken"]
    assert cluster.answers(answer) == cluster.expected()


pytest.importorskip("starlette")
NUMBER = "\ntiered_index_log_number "
ASKED = {"topic": "t", "key": "k", "max_count": "1000"}


def test_a_service_names_a_broker_that_hangs_and_stays_ready(cluster, hangs, clock):
    away = cluster.uris[1]
    expected = len(cluster.expected([uri for uri in cluster.uris if uri != away]))
    with (
        cluster.reader(clock=clock, refresh_interval_s=10, source_timeout_s=SHORT_S) as reader,
        serving(reader) as client,
    ):
        for operation in ("get_range", "list"):
            hangs(away, operation, times=None)
        clock.advance(11)
        page = client.get("/v1/query", params=ASKED | {"allow_partial": "true"}).json()
        topics = client.get("/v1/topics", params={"allow_partial": "true"}).json()
        assert (page["status"], len(page["items"])) == ("partial", expected)
        assert {report["source"] for report in page["failed"] + topics["failed"]} == {away}
        refused = client.get("/v1/query", params=ASKED)
        assert refused.status_code == 502 and "did not answer" in refused.json()["detail"]
        # the others can be served, so this replica stays ready
        assert client.get("/readyz").status_code == 200
        (problem,) = client.get("/v1/health").json()["problems"]
        assert away in problem["reason"]


def test_the_sum_of_log_numbers_waits_for_a_broker_that_is_away_at_the_opening(cluster, monkeypatch):
    # a smaller sum would fire the alert for a restored storage
    away, listed = [cluster.uris[1]], MemoryStorage.list

    def list_or_fail(self, *args, **named):
        if self.uri in away:
            raise StorageUnavailable(f"{self.uri} is away")
        return listed(self, *args, **named)

    monkeypatch.setattr(MemoryStorage, "list", list_or_fail)
    clock = ManualClock(1_700_000_000_000)
    with cluster.reader(clock=clock, refresh_interval_s=10) as reader, serving(reader) as client:
        assert NUMBER not in client.get("/metrics").text
        away.clear()
        clock.advance(11)
        assert client.get("/v1/query", params=ASKED).json()["status"] == "complete"
        # also while nobody refreshes the list
        clock.advance(100_000)
        assert NUMBER in client.get("/metrics").text


def test_an_index_that_answers_too_late_for_its_reader_is_closed(cluster, opened, monkeypatch):
    late = Watched(open_storage(cluster.uris[1]))
    hang = late.hang("get", name_prefix="checkpoint/")
    real = IndexConfig.open_storage
    monkeypatch.setattr(IndexConfig, "open_storage", lambda config, uri: late if uri == late.uri else real(config, uri))
    cluster.reader(source_timeout_s=SHORT_S).close()
    assert [storage.closed for storage in (*opened, late)] == [1, 1, 0]
    hang.release.set()
    until(lambda: late.closed)


def test_lookups_with_a_very_short_timeout_leave_a_hanging_index(cluster, hangs, clock):
    away = cluster.uris[1]
    with cluster.reader(clock=clock, source_timeout_s=SHORT_S, query_threads=2) as reader:
        hangs(away, "get_range", times=None)
        answers = []
        until(lambda: answers.append(ask(reader, timeout_s=0.1)) or sources(answers[-1]) == {away})
        assert cluster.answers(answers[-1]) == cluster.expected([uri for uri in cluster.uris if uri != away])
