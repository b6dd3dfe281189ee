"""The listener for RocketMQ's remoting protocol, its access keys and audit records."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta
from msgspec.structs import asdict

from tiered_index.connectors.rocketmq.remoting.broker import ReadOnlyBroker
from tiered_index.connectors.rocketmq.remoting.frames import ACCESS_KEY, AccessKey, Command, ResponseCode, name_of
from tiered_index.connectors.rocketmq.remoting.server import RemotingServer
from tiered_index.errors import SetupUnavailable
from tiered_index.server.http.listening import Tls
from tiered_index.server.http.metrics import Metrics
from tiered_index.server.http.served import SHOWN, Audit, Served
from tiered_index.server.http.tokens import Grant, read_grants
from tiered_index.service.read.answers.budget import LookupLimits

# RocketMQ's clients wait for 18 s
_LONGEST_S = 15.0
# Fields of a request in a record of the audit log.
_ASKED = ("topic", "key", "offset", "queueId", "queueOffset")


def remoting_listener(
    served: Served,
    metrics: Metrics,
    *,
    bound: socket.socket,
    store: Path | None,
    keys: Path | None,
    tls: Tls | None,
    threads: int,
    **named: Any,
) -> RemotingServer:
    """Return the server of RocketMQ's protocol, which does not listen yet; `bound` is bound to its address.

    `keys` is a file for `read_keys`. See `ReadOnlyBroker` for `named`. Raises `ConfigError` for files that can't be
    used.
    """

    def observe(request: Command, response: Command, seconds: float) -> None:
        metrics.rocketmq_request(name_of(request.code), ResponseCode(response.code).name, seconds)

    lookups, limits = served.lookups, served.caps.limits.least(LookupLimits(timeout_s=_LONGEST_S))
    settings: Any = {"root": lookups.config.root, "on_lookup": metrics.lookup, **asdict(limits), **named}
    broker = ReadOnlyBroker(lookups, store=store, **settings)
    known = read_keys(keys) if keys is not None else None
    context = tls.context() if tls is not None else None
    audited = partial(_audit, served.audit, known is not None) if served.audit.is_on else None
    return RemotingServer(broker, bound, keys=known, tls=context, threads=threads, audit=audited, observe=observe)


def _audit(audit: Audit, signed: bool, request: Command, response: Command, is_known: bool) -> None:
    """Write a request to the audit log."""
    refused = response.code == ResponseCode.NO_PERMISSION
    caller = None if not is_known else request.fields[ACCESS_KEY] if signed else "anyone"
    fields = {name: request.fields[name][:SHOWN] for name in _ASKED if name in request.fields}
    audit.write(
        {
            "caller": caller,
            # without a valid signature the name is only a claim
            **({} if is_known else {"claimed": request.fields.get(ACCESS_KEY, "")[:SHOWN]}),
            ("refused" if refused else "lookup"): f"rocketmq:{name_of(request.code)}",
            # identifies requests whose name is `other`
            "code": request.code,
            **fields,
            **({"withheld": response.withheld} if response.withheld else {}),
            "status": response.code,
        }
    )


class _Key(Grant):
    secret: Annotated[str, Meta(pattern=r"\A.+\Z")]


def read_keys(path: Path) -> Mapping[str, AccessKey]:
    """Return the keys of a file ``{"NAME": {"secret": "...", "topics": ["PREFIX", ...]}}``.

    A key without `topics` allows every topic. Raises `SetupUnavailable`, whose text has nothing of the file.
    """
    expected = 'a file of keys, {"NAME": {"secret": "...", "topics": ["PREFIX"]}}'
    rows = read_grants(path, expected, dict[str, _Key])
    if not rows:
        raise SetupUnavailable(f"{path} has no keys: every request would be refused")
    return {name: AccessKey(row.secret, row.topics) for name, row in rows.items()}
