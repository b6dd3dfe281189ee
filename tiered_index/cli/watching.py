"""How a follower is: its metrics and what is amiss, for the service beside it or on a port of its own.

Needs the extra `server`, which only this and `serve` load. Threads: any.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from tiered_index.cli.session import Session
from tiered_index.errors import ConfigError

if TYPE_CHECKING:
    from tiered_index.cli.follow import Follower


@contextlib.contextmanager
def server_extra(what: str) -> Iterator[None]:
    """Have imports within the block say what is missing. Raises `ConfigError`."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tiered_index"):
            raise
        raise ConfigError(
            f"{what} needs the extra 'server' ({error.name} is missing): pip install 'tiered_index[server]'"
        ) from error


def problems_of(follower: Follower, max_lag_s: float | None) -> list[str]:
    """Return what is amiss with a follower beside its index: what is not archived, and a lag beyond the bound."""
    archiving = follower.archiving
    found = [f"archive: {archiving.problem}"] if archiving is not None and archiving.problem is not None else []
    if max_lag_s is None:
        return found
    lag = follower.dispatcher.lag()
    if lag.seconds is None:
        return [*found, f"follow: {lag.bytes:,} bytes behind the store, and how many seconds is not known yet"]
    if lag.seconds > max_lag_s:
        found.append(f"follow: {lag.bytes:,} bytes and {lag.seconds:g} seconds behind the store")
    return found


def gauges_of(follower: Follower) -> dict[str, tuple[str, float]]:
    """Return how far a follower is: what each number means, and the number."""
    lag, position = follower.dispatcher.lag(), follower.dispatcher.position or 0
    seconds = math.nan if lag.seconds is None else lag.seconds
    return {
        "follow_position_bytes": ("Commit log offset up to which the store is indexed.", position),
        "follow_lag_bytes": ("Bytes behind the end of the store's log.", lag.bytes),
        "follow_lag_seconds": ("Seconds behind the newest message; NaN: not known.", seconds),
        "follow_messages_total": ("Messages that were read.", follower.messages),
        "follow_lost_ranges_total": ("Ranges of the log that were damaged or deleted unread.", follower.loss_count),
    }


@dataclass
class Watch:
    """`/metrics`, `/livez` and `/readyz` of a follower at `host` and `port`, from before its index is opened: a
    context, within which `show` is called. Raises `ConfigError` without the extra, or the address.
    """

    session: Session
    host: str
    port: int
    max_lag_s: float | None = None

    def __enter__(self) -> Self:
        with server_extra("--metrics-port"):
            from tiered_index.server.health import StandIn
            from tiered_index.server.listening import HttpListener, in_background
        self._stand_in = StandIn()
        listener = HttpListener(self._stand_in, self.host, self.port)
        self._serving = in_background(listener)
        self._serving.__enter__()
        self.session.out.note(f"metrics at {listener.url}/metrics")
        return self

    @contextlib.contextmanager
    def show(self, follower: Follower) -> Iterator[None]:
        """Show how a follower is until the block ends."""
        from tiered_index.server.app import Service
        from tiered_index.server.calls import Caps
        from tiered_index.server.listening import is_local, own_names
        from tiered_index.server.served import Audit, Served, messages_of, redaction_of

        index, store = follower.index, follower.dispatcher.store.folder
        served = Served(
            index,
            messages_of(index, store),
            Caps(),
            redaction_of(index, store),
            Audit(None),
            problems=lambda: problems_of(follower, self.max_lag_s),
            gauges=lambda: gauges_of(follower),
        )
        hosts = own_names(self.host) if is_local(self.host) else None
        with Service(served, threads=2, hosts=hosts, only_health=True) as service:
            self._stand_in.app = service.app
            try:
                yield
            finally:
                self._stand_in.reason, self._stand_in.app = "stopping", None

    def __exit__(self, *error: Any) -> None:
        self._serving.__exit__(*error)
