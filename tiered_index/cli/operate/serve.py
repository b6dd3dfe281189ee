"""`tiered-index serve`: lookups over HTTP. It needs the extra `server`."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiered_index.cli.operate.commands import AddressOptions, BoundOptions, ToolsOptions, WritingOptions
from tiered_index.cli.options import LogAs
from tiered_index.cli.session import Session
from tiered_index.connectors.kafka.spec import KafkaOptions
from tiered_index.connectors.rocketmq.spec import ArchiveOptions
from tiered_index.errors import ConfigError, install_hint


@contextlib.contextmanager
def server_extra() -> Iterator[None]:
    """Raise `ConfigError`, which names the extra, if an import in the block fails."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tiered_index"):
            raise
        missing = (error.name or "").partition(".")[0]
        raise ConfigError(f"serve needs the extra 'server' ({missing} is missing): {install_hint('server')}") from error


def serve(
    session: Session,
    *,
    address: AddressOptions,
    store: str | None,
    writing: WritingOptions,
    tools: ToolsOptions,
    audit_log: Path | None,
    log_format: LogAs,
    bounds: BoundOptions,
    archiving: ArchiveOptions,
    kafka: KafkaOptions,
    others: Any = None,
) -> int:
    """Serve lookups over HTTP until SIGTERM or SIGINT. `others` are those of `ingest`."""
    session.log_as(log_format)
    # the brackets of an IPv6 address in a URL
    address = replace(address, host=address.host.removeprefix("[").removesuffix("]"))
    with server_extra():
        from tiered_index.cli.operate.serving import Serving
    Serving(session, address, store, writing, tools, audit_log, bounds, archiving, kafka, others).run()
    session.out.answer({"status": "stopped"}, streamed=True)
    return 0
