"""Spans of OpenTelemetry if the process has set it up, and no import of it otherwise; a log for programs."""

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.server.conftest import index_in, published, serving
from tiered_index import IndexReader

OURS = ("GET /v1/query", "tiered_index.query", "tiered_index.storage.get_range")
ABOVE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch):
    """Trace during this test alone; return a function for the ended spans. A process keeps the first provider that is
    set, and pytest-xdist can run other tests between those of this module.
    """
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return exporter.get_finished_spans


def test_a_lookup_is_a_span_of_its_requests_trace_above_its_reads(tmp_path, spans):
    with IndexReader.open(published(tmp_path)) as reader, serving(reader) as client:
        headers = {"traceparent": ABOVE, "x-request-id": "r-1"}
        client.get("/v1/query", params={"topic": "orders", "key": "order-4711"}, headers=headers)
        client.get("/v1/files/x", headers=headers)
    by_name = {span.name: span for span in spans()}
    request, lookup, read = (by_name[name] for name in OURS)
    above = f"{request.context.trace_id:032x}-{request.parent.span_id:016x}"
    assert f"00-{above}-01" == ABOVE
    assert [span.parent.span_id for span in (lookup, read)] == [request.context.span_id, lookup.context.span_id]
    attributes = {name: lookup.attributes[f"tiered_index.{name}"] for name in ("request_id", "status", "count")}
    assert attributes == {"request_id": "r-1", "status": "complete", "count": 2}
    attributes = [request.attributes[name] for name in ("tiered_index.request_id", "http.response.status_code")]
    assert attributes == ["r-1", 200]
    assert lookup.attributes["tiered_index.requests"] >= 1 and read.attributes["tiered_index.object"]
    assert by_name["GET /v1/files/{id}"].attributes["http.response.status_code"] == 404
    # one span a request, and no key in any
    assert len([span for span in spans() if span.name.startswith("GET ")]) == 2
    assert "order-4711" not in str([span.to_json() for span in spans()])


def test_a_request_that_fails_has_route_and_status(tmp_path, spans, monkeypatch):
    with index_in(tmp_path) as index, serving(index) as client:
        client.get("/v1/query", params={"topic": "orders", "key": "secret", "cursor": "x"})
        monkeypatch.setattr(index, "topics", lambda *_, **__: 1 / 0)
        client.get("/v1/topics")
    wrong, failed = (span for span in spans() if span.name.startswith("GET"))
    assert (wrong.name, wrong.attributes["http.response.status_code"]) == ("GET /v1/query", 400)
    # a client's mistake is no error of the service
    assert wrong.status.is_unset and not wrong.events
    assert (failed.name, failed.attributes["http.response.status_code"]) == ("GET /v1/topics", 500)
    assert not failed.status.is_ok and "ZeroDivisionError" in failed.events[0].attributes["exception.type"]
