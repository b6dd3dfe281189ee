"""The contract of a connector: what a command asks of it. `tiered_index.connectors.registry` finds connectors."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from tiered_index.config import IndexConfig
    from tiered_index.connectors.follow import Archiver, Source
    from tiered_index.service.index import IndexService


@dataclass(frozen=True, kw_only=True)
class SourceRun:
    """A run that reads a source.

    - `address`: the source, as the user wrote it.
    - `options`: the connector's options; None: it has none, or none were given.
    - `name`: the name of the source in the index; None: the connector's default.
    - `follow`: whether the run goes on at the end of the source.
    - `restart`: whether it reads the source from its start.
    - `stopped`: returns whether the run is to end.
    - `note`: called with each message for the operator.
    """

    address: str
    options: Any = None
    name: str | None = None
    follow: bool = True
    restart: bool = False
    stopped: Callable[[], bool] = bool
    note: Callable[[str], None]


class OpenedSource(NamedTuple):
    """A source, what archives its messages (None: nothing), and the name by which answers and documents call it."""

    source: Source
    archiver: Archiver | None
    name: str


class Connector(Protocol):
    """Reads one kind of source. Threads: any, for each source one at a time."""

    def check(self, run: SourceRun, config: IndexConfig) -> None:
        """Raise the errors of a wrong address and of wrong options, before an index of these settings is made."""

    def source(self, run: SourceRun, index: IndexService) -> OpenedSource:
        """Open the source, whose entries go into `index`. The caller closes it."""

    def watch(self, tell: Callable[[str], None]) -> AbstractContextManager[Callable[[], list[str]]]:
        """Return a context around all that reads sources; its value returns present problems of the process.

        A connector whose client may hang ends the process there, after it told the reason.
        """
