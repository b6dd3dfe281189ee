"""Probes and metrics are correct: the reason why a service is not ready, and its counts."""

import contextlib
import errno
import threading

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.server.conftest import PATIENCE_S, index_in, published, put_entries, serving
from tests.support.core import using
from tests.support.disk_faults import FaultDisk
from tests.support.storage_faults import FaultStorage
from tiered_index import IndexReader, IndexService
from tiered_index.base.clock import ManualClock, SystemClock
from tiered_index.base.version import __version__
from tiered_index.cli.main import run
from tiered_index.cli.session import Session
from tiered_index.errors import BackPressure, ConfigError, TieredIndexError
from tiered_index.server.http import served
from tiered_index.server.http.listening import HttpListener
from tiered_index.server.http.served import Caps
from tiered_index.server.http.tokens import add_token
from tiered_index.service.log.log import StorageLog
from tiered_index.service.read.answers.budget import LookupLimits
from tiered_index.service.read.caches import store
from tiered_index.storage.opening import open_storage

SETTINGS = {"slots": 100, "items": 1000, "background": False}
KNOWN, UNKNOWN = {"topic": "orders", "key": "order-4711"}, {"topic": "orders", "key": "nobody"}


def values(client):
    """Return each sample's value by its name and labels' values."""
    families = text_string_to_metric_families(client.get("/metrics").text)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


class Life:
    """An index on a disk and a storage that fail on demand."""

    def __init__(self, folder):
        self.uri = (folder / "storage").as_uri()
        self.disk, self.storage = FaultDisk(), FaultStorage(open_storage(self.uri))
        self.index = IndexService.open(root=folder / "root", disk=self.disk, storage_backend=self.storage, **SETTINGS)

    def fence(self):
        log = StorageLog(open_storage(self.uri), SystemClock())
        log.open()
        log.claim_epoch()
        self.index.run_lifecycle()

    def fill_the_disk(self):
        self.disk.fail("*", times=None, error=errno.ENOSPC)
        self.index.flush()

    def cut_the_storage(self):
        self.storage.fail("*", times=None)
        self.index.run_lifecycle()

    def close(self):
        self.disk.clear()
        self.storage.clear()
        self.index.abandon()


@pytest.mark.parametrize(
    ("befall", "reason"),
    [(Life.fence, "a newer writer"), (Life.fill_the_disk, "No space left"), (Life.cut_the_storage, "scripted fault")],
)
def test_a_fault_that_stops_a_writer_is_a_reason(tmp_path, befall, reason):
    with contextlib.closing(Life(tmp_path)) as life:
        put_entries(life.index)
        life.index.seal()
        life.index.put("orders", 0, "k", 1, 1, 1_762_000_000_000)
        with serving(life.index) as client:
            assert client.get("/readyz").json() == {"status": "ready", "reasons": [], "problems": []}
            assert client.get("/v1/health").json() == {"status": "healthy", "ready": True, "problems": []}
            assert values(client)["tiered_index_lease_held",] == 1
            with pytest.raises(TieredIndexError):
                befall(life)
            got = client.get("/readyz")
            # only a writer that was replaced leaves its files to another
            assert got.status_code == (503 if befall is Life.fence else 200)
            assert (got.json()["status"] == "not ready") == bool(got.json()["reasons"]) == (befall is Life.fence)
            assert any(reason in problem for problem in got.json()["problems"]), got.json()
            health = client.get("/v1/health").json()
            assert (health["status"], health["ready"]) == ("problems", befall is not Life.fence)
            assert [problem["reason"] for problem in health["problems"]] == got.json()["problems"]
            assert {problem["part"] for problem in health["problems"]} == {"writer"}
            assert values(client)["tiered_index_service_problems", "writer"] == len(health["problems"])
            assert str(tmp_path) not in got.text
            assert client.get("/livez").json() == {"status": "alive"}
            assert values(client)["tiered_index_lease_held",] == (befall is not Life.fence)
            assert values(client)["tiered_index_fenced",] == (befall is Life.fence)
            # it finds the entries that it has
            assert len(client.get("/v1/query", params=KNOWN).json()["items"]) == 2


@pytest.mark.usefixtures("tokens_looked_at")
def test_a_problem_of_all_replicas_leaves_each_of_them_ready(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(served, "_LOOK_KEEPS_S", 0.0)
    file = tmp_path / "tokens.json"
    token = {"authorization": f"Bearer {add_token(file, 'ops', 'read', None)}"}
    with contextlib.closing(Life(tmp_path)) as life:
        put_entries(life.index)
        life.index.seal()
        life.index.run_lifecycle()
        with IndexReader.open(life.uri, storage_backend=life.storage) as reader, serving(reader, tokens=file) as client:
            client.headers.update(token)
            assert values(client)["tiered_index_service_problems", "storage"] == 0
            life.storage.fail("*", times=None)
            text = file.read_text()
            file.write_text(text[:-10])
            shown = values(client)
            assert shown["tiered_index_ready",] == 1
            parts = ("storage", "tokens", "audit")
            assert [shown["tiered_index_service_problems", part] for part in parts] == [1, 1, 0]
            got = client.get("/readyz")
            assert (got.status_code, got.json()["reasons"]) == (200, [])
            assert got.json()["problems"] == ["storage", "tokens"]
            problems = client.get("/v1/health").json()["problems"]
            assert [problem["part"] for problem in problems] == ["storage", "tokens"]
            assert "scripted fault" in problems[0]["reason"]
            said = f"{file} is not a file of tokens: it is not JSON; the last known tokens stay valid"
            assert [record.message for record in caplog.records if "last known tokens" in record.message] == [said]
            # the client learns the reason, and when to retry
            got = client.get("/v1/query", params=KNOWN)
            assert (got.status_code, got.headers["retry-after"]) == (502, "1")
            file.write_text(text)
            assert values(client)["tiered_index_service_problems", "tokens"] == 0
            assert any("can be read again" in record.message for record in caplog.records)


def test_a_service_that_recovers_says_so(tmp_path, monkeypatch, capsys):
    heard, made, enter = [], [], HttpListener.__aenter__

    async def entered(listener):
        made.append(listener)
        return await enter(listener)

    def opening(self, config):
        (listener,) = made
        with httpx.Client(base_url=listener.url, timeout=PATIENCE_S, trust_env=False) as asking:
            heard.extend(asking.get(path) for path in ("/livez", "/readyz", "/v1/topics"))
        raise ConfigError("it ends here")

    monkeypatch.setattr(HttpListener, "__aenter__", entered)
    monkeypatch.setattr(Session, "open_reader", opening)
    with pytest.raises(SystemExit):
        run(["serve", "--storage", tmp_path.as_uri(), "--port", "0"])
    live, ready, topics = heard
    assert (live.status_code, live.json()) == (200, {"status": "alive"})
    assert (ready.status_code, topics.status_code) == (503, 503)
    assert topics.headers["content-type"] == "application/problem+json" and topics.headers["retry-after"] == "1"
    assert (topics.json()["status"], topics.json()["detail"]) == (503, "recovering: the index is being opened")
    assert ready.json()["reasons"] == ["recovering: the index is being opened"]
    assert "it ends here" in capsys.readouterr().err


def test_probes_do_not_wait_for_each_others_look_at_the_storage(tmp_path, monkeypatch):
    entered, go_on = threading.Event(), threading.Event()
    with IndexReader.open(published(tmp_path)) as reader, serving(reader) as client:
        monkeypatch.setattr(reader, "refresh", lambda: (entered.set(), go_on.wait(PATIENCE_S)))
        first = threading.Thread(target=client.get, args=("/readyz",))
        first.start()
        assert entered.wait(PATIENCE_S)
        # the answer arrives before the first check has ended
        got = client.get("/readyz")
        assert (got.status_code, got.json()["problems"]) == (200, ["storage: not checked yet"])
        go_on.set()
        first.join(PATIENCE_S)
        assert client.get("/readyz").json()["problems"] == []


def test_metrics_show_the_places_of_lookups_and_the_work_of_filters(tmp_path, monkeypatch):
    with index_in(tmp_path) as index:
        put_entries(index)
        with serving(index) as client:
            client.get("/v1/query", params=KNOWN)
            shown = values(client)
            assert shown["tiered_index_lookups_total", "query", "local", "complete"] == 1
            assert shown["tiered_index_files", "unsealed"] == 1
            assert shown["tiered_index_http_request_seconds_count", "GET", "/v1/query", "200"] == 1
        index.seal()
        index.run_lifecycle()
    # the compiled core has its own check of filters
    with using(None), IndexReader.open((tmp_path / "storage").as_uri()) as reader, serving(reader) as client:
        for params in (KNOWN, KNOWN):
            client.get("/v1/query", params=params)
        reader.fetch_filter(reader.files()[0].file_id)
        client.get("/v1/query", params=UNKNOWN)
        monkeypatch.setattr(store, "block_may_hold", lambda *_: True)
        client.get("/v1/query", params=UNKNOWN | {"key": "no one"})
        monkeypatch.undo()
        shown = values(client)
        places = {name[2]: value for name, value in shown.items() if name[0] == "tiered_index_lookups_total"}
        assert places == {"storage": 2, "cache": 1, "none": 1} or places == {"storage": 1, "cache": 2, "none": 1}
        assert shown["tiered_index_lookup_files_skipped_total", "filter"] == 1
        assert shown["tiered_index_filter_false_positives_total",] == 1
        assert shown["tiered_index_lookup_storage_bytes_count",] == 4
        assert shown["tiered_index_lookup_storage_bytes_sum",] == shown["tiered_index_lookup_bytes_total",] > 0
        (stored,) = (tmp_path / "storage").rglob("*.index")
        assert shown["tiered_index_files", "storage"] == 1
        assert shown["tiered_index_build_info", __version__] == 1 and shown["process_resident_memory_bytes",] > 0
        assert shown["tiered_index_file_bytes", "storage"] == stored.stat().st_size
        assert not any(key in client.get("/metrics").text for key in ("order-4711", "nobody", "orders"))


def test_metrics_tell_how_a_writer_is(tmp_path):
    clock = ManualClock(1_762_000_090_000)
    with index_in(tmp_path, clock=clock, buffer_max_entries=10, lease_ttl_s=30) as index:
        index.put("orders", 0, "k", 1, 1, 1_762_000_000_000, source="shop", source_position=7)
        index.put("orders", 0, "late", 2, 1, 1_000_000_000_000)
        index.seal()
        index.run_lifecycle()
        clock.advance(5)
        index.put("orders", 0, [f"k{n}" for n in range(9)], 3, 1, 1_762_000_000_000)
        with pytest.raises(BackPressure):
            index.put("orders", 0, ["a", "b"], 4, 1, 1_762_000_000_000)
        with serving(index) as client:
            shown = values(client)
    expected = {
        ("put_entries_total",): 11,
        ("put_refusals_total",): 1,
        ("buffered_entries",): 9,
        ("quarantined_entries_total",): 1,
        ("durable_position", "shop"): 7,
        ("durable_position_age_seconds", "shop"): 5,
        ("lease_held",): 1,
        ("lease_remaining_seconds",): 25,
        ("writer_epoch",): 1,
        # one main file, one of the quarantine
        **{("lifecycle_seconds_count", step): 2 for step in ("seal", "compact", "upload")},
        ("lifecycle_seconds_count", "retire"): 0,
        ("lifecycle_errors_total", "upload"): 0,
        ("worker_errors_total", "lifecycle"): 0,
    }
    assert {name: shown["tiered_index_" + name[0], *name[1:]] for name in expected} == expected


def test_a_short_time_of_lookups_is_none_for_probes_and_no_short_sum_for_du(tmp_path):
    caps = Caps(limits=LookupLimits(10_000, 1 << 30, 1e-7))
    with IndexReader.open(published(tmp_path)) as reader, serving(reader, caps=caps) as client:
        assert client.get("/v1/health").json() == {"status": "healthy", "ready": True, "problems": []}
        assert client.get("/readyz").json()["problems"] == []
        answer = client.get("/v1/du")
        assert (answer.status_code, answer.json()["error"]) == (422, "BudgetExceeded")
        assert "was not read" in answer.json()["detail"] and "totals" not in answer.json()


def test_a_writer_that_has_not_read_its_log_has_no_log_number(tmp_path):
    # 0, and then the number, would fire the alert for a restored storage
    published(tmp_path)
    storage = FaultStorage(open_storage((tmp_path / "storage").as_uri()))
    storage.fail("*", times=None)
    with (
        IndexService.open(root=tmp_path / "root", storage_backend=storage, **SETTINGS) as index,
        serving(index) as client,
    ):
        assert ("tiered_index_log_number",) not in values(client)
        # as the runbook says of a writer that could not take its lease
        assert values(client)["tiered_index_lease_remaining_seconds",] == 0
        assert client.get("/readyz").json()["problems"]
        storage.clear()
        index.run_lifecycle()
        assert values(client)["tiered_index_log_number",] > 0
