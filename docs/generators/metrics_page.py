"""The page of metrics, made from the metrics that a service of each kind exports."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from tiered_index import IndexReader, IndexService
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.kafka.source import KafkaSource
from tiered_index.connectors.read_again import MessageSources
from tiered_index.connectors.source import Lag
from tiered_index.server.app import HttpService
from tiered_index.server.http.served import Audit, Caps, Served, redaction_of

__all__ = ["exported", "page"]

PREFIX = "tiered_index_"
_ENDS = ("_bucket", "_sum", "_count")


@contextmanager
def exported() -> Iterator[dict[str, list[Metric]]]:
    """Yield the metrics of a reader's service (`reader`), and of a writer's that follows a store (`writer`)."""
    with tempfile.TemporaryDirectory() as folder:
        uri, settings = (Path(folder) / "storage").as_uri(), {"slots": 100, "items": 1000, "background": False}
        with IndexService.open(root=Path(folder) / "root", storage=uri, **settings) as index:
            index.put("orders", 0, "order-4711", 1, 1, 1_762_000_000_000, source="shop", source_position=1)
            index.flush()
            gauges: dict[str, Any] = {}
            for unit in ("bytes", "records"):  # of a RocketMQ store, of Kafka
                source: Any = SimpleNamespace(lag=lambda: Lag(10, 10, 1.0), positions=dict, unit=unit)
                if unit == "records":
                    source.gauges = partial(KafkaSource.gauges, source)
                    source.group, source._failed, source._held = None, {}, lambda **_: []
                gauges |= Follower(index, source).gauges()
            with IndexReader.open(uri) as reader:
                yield {"reader": _families(reader), "writer": _families(index, gauges=lambda: gauges)}


def _families(lookups: Any, **more: Any) -> list[Metric]:
    sources = MessageSources(lookups, lookups.config)
    parts = lookups, sources, Caps(), redaction_of(lookups, None), Audit(None)
    with HttpService(Served(*parts, **more)) as service:
        metrics = service.metrics
        metrics.request("/v1/query", "GET", 200, 0.1)
        metrics.rocketmq_request("QUERY_MESSAGE", "SUCCESS", 0.1)
        metrics.lookup("query", "complete", lookups.query("orders", "order-4711").explain)
        return list(text_string_to_metric_families(metrics.page().decode()))


def page() -> str:
    """Return three tables: the metrics of every service, those of a writer, and those of a follower."""
    with exported() as by_role:
        families = {family.name: family for family in by_role["writer"] if family.name.startswith(PREFIX)}
        everywhere = {family.name for family in by_role["reader"]}
    follower = {name for name in families if name.startswith(f"{PREFIX}follow_")}
    parts = ["# Metrics\n", f"Each name has the prefix `{PREFIX}`.\n"]
    for title, names in (
        ("Every service", [name for name in families if name in everywhere]),
        ("A writer also", [name for name in families if name not in everywhere | follower]),
        ("A follower also", [name for name in families if name in follower]),
    ):
        rows = ["| metric | type | labels | meaning |", "|---|---|---|---|"]
        rows += [_row(families[name]) for name in sorted(names)]
        parts += [f"## {title}\n", "\n".join(rows) + "\n"]
    return "\n".join(parts)


def _row(family: Metric) -> str:
    labels = {label for sample in family.samples for label in sample.labels} - {"le"}
    name = family.name + ("_total" if family.type == "counter" else "_info" if family.type == "info" else "")
    name = family.samples[0].name if family.samples and not family.samples[0].name.endswith(_ENDS) else name
    shown = ", ".join(f"`{label}`" for label in sorted(labels))
    return f"| `{name.removeprefix(PREFIX)}` | {family.type} | {shown} | {family.documentation} |"
