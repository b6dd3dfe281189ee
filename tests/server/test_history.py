"""The last hour of figures: samples by a clock of the test, and the thresholds of the deployed alerts."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from tests.server.conftest import published, serving
from tiered_index import IndexReader, IndexService
from tiered_index.errors import StorageUnavailable
from tiered_index.server.history import FIGURES, History
from tiered_index.server.metrics import Metrics
from tiered_index.server.served import Served
from tiered_index.server.tokens import add_token
from tiered_index.types import Explain

ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yaml"
METRICS = {"http_failures": 'status=~"50[0-2]"', "http_requests": "http_request_seconds_count"}


@pytest.fixture
def past(index):
    """A history of a writer whose follower is `lag` seconds behind at the second `now_s`."""
    now = SimpleNamespace(now_s=1000.0, lag=5.0)
    counters = Metrics(index)
    served = SimpleNamespace(lookups=index, writer=index, gauges=lambda: {"follow_lag_seconds": ("", now.lag)})
    now.counters, now.history = counters, History(served, counters, lambda: now.now_s)
    yield now


def figures(history):
    return {one["title"]: one["values"] for one in history.document()["figures"]}


def test_an_hour_is_shown_and_no_more_is_kept_than_its_figures_need(past):
    for number in range(1000):
        past.lag = float(number)
        past.history.run_once()
        past.now_s += 15
    document = past.history.document()
    assert len(document["times_ms"]) == 240 and len(past.history._samples) == 481
    assert document["end_ms"] - document["begin_ms"] == 3_600_000
    assert document["times_ms"][0] == document["begin_ms"] and document["times_ms"][-1] == document["end_ms"] - 15_000
    assert figures(past.history)["Lag behind the source"] == [float(number) for number in range(760, 1000)]


def test_figures_of_a_span_are_growth_within_it(past):
    lookup = Explain(requests=3, cost_usd=0.0, bytes=10)
    for number in range(100):
        past.counters.request("/v1/query", "GET", 502 if number >= 60 else 200, 0.1)
        if number < 40:
            past.counters.lookup("query", "complete", lookup)
        past.history.run_once()
        past.now_s += 15
    shown = figures(past.history)
    # of five minutes: 20 requests
    assert shown["Failed requests over HTTP"][0] is None
    assert shown["Failed requests over HTTP"][59:70] == [n / 20 for n in range(11)]
    assert shown["Requests to the storage per lookup"][:3] == [None, 3.0, 3.0]
    assert shown["Requests to the storage per minute"][1:] == [0.0] * 99


def test_a_lag_that_is_not_known_is_none(past):
    past.history.run_once()
    past.lag = float("nan")
    past.now_s += 15
    past.history.run_once()
    assert figures(past.history)["Lag behind the source"] == [5.0, None]


def test_a_lag_that_was_never_known_is_shown_because_its_alert_fires(past):
    past.lag = float("nan")
    past.history.run_once()
    (shown,) = [one for one in past.history.document()["figures"] if one["title"] == "Lag behind the source"]
    assert shown["alert"]["unknown_fires"] and shown["values"] == [None]


def test_a_fenced_writer_has_no_lease_left_because_its_alert_does_not_fire(past, monkeypatch):
    past.history.run_once()
    health = past.history._served.writer.health() | {"fenced": True, "lease_left_s": None}
    monkeypatch.setattr(IndexService, "health", lambda _: health)
    past.now_s += 15
    past.history.run_once()
    held, fenced = figures(past.history)["Lease left"]
    assert held is not None and fenced is None


def test_figures_that_fail_once_come_again(past, caplog):
    past.history._served.gauges = lambda: (_ for _ in ()).throw(StorageUnavailable("away"))
    past.history.run_once()
    assert past.history.document()["times_ms"] == [] and "away" in caplog.text


@pytest.mark.parametrize("figure", [one for one in FIGURES if one.alert], ids=lambda one: one.alert.name)
def test_the_thresholds_are_those_of_the_alerts(figure):
    rules = {one["alert"]: one for one in yaml.safe_load(ALERTS.read_text())["groups"][0]["rules"]}
    rule, alert = rules[figure.alert.name], figure.alert
    # a held lease has time left
    name = {"lease_remaining_seconds": "lease_held"}.get(figure.of, figure.of)
    assert METRICS.get(name, f"tiered_index_{name}") in rule["expr"]
    threshold = r"== (\S+) and" if alert.is_floor else r"(?:>|<=) (\S+)$"
    assert [float(one) for one in re.findall(threshold, rule["expr"])] == [alert.threshold]
    assert rule["for"] == f"{alert.for_s // 60}m" or rule["for"] == f"{alert.for_s // 3600}h"
    # `unless` also keeps NaN
    assert alert.unknown_fires == (" unless " in rule["expr"])
    if figure.over_s:
        assert f"[{figure.over_s // 60}m]" in rule["expr"] or f"[{figure.over_s // 3600}h]" in rule["expr"]


def test_a_service_has_it_from_its_start_and_asks_the_storage_for_nothing(client, tmp_path):
    document = client.get("/v1/history").json()
    titles = [one["title"] for one in document["figures"]]
    assert {"Lease left", "Entries in the write buffer"} <= {*titles} and len(document["times_ms"])
    with IndexReader.open(published(tmp_path)) as reader:
        history = History(Served(reader, None, None, None, None), Metrics(reader))
        before = reader.storages[0].total.requests
        history.run_once()
        assert reader.storages[0].total.requests == before
        assert [one["title"] for one in history.document()["figures"]] == []


def test_a_token_sees_its_permissions_and_no_figures_of_other_topics(index, client, tmp_path):
    assert client.get("/v1/token").json() == {"name": "anyone", "role": "admin", "topics": None}
    path = tmp_path / "tokens.json"
    some = add_token(path, "some", "read", ["pay"])
    with serving(index, tokens=path) as guarded:
        guarded.headers["authorization"] = f"Bearer {some}"
        assert guarded.get("/v1/token").json() == {"name": "some", "role": "read", "topics": ["pay"]}
        assert guarded.get("/v1/history").status_code == 403
        del guarded.headers["authorization"]
        assert guarded.get("/v1/token").status_code == 401
