"""The registry of connectors: what entries come from, and which connector reads an address.

A connector is described by a `ConnectorSpec`, which costs little to import. `Registry.connector` loads the rest, when
it is needed. Another package adds a connector by an entry point of the group `tiered_index.connectors`: its name is
that of the connector, its value the spec. A connector that can't be loaded is a problem of its own: it is noted in
`problems`, and the others work.

Imports no library, because the help of commands needs it.
"""

from __future__ import annotations

import contextlib
import os
import pkgutil
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tiered_index.errors import ConfigError, TieredIndexError

if TYPE_CHECKING:
    from tiered_index.connectors.contract import TopicQueues

GROUP = "tiered_index.connectors"
"""The group of entry points."""
FILES = "files"
"""The name of the connector that reads each address that no other one claims."""
OF_OTHERS = "rocketmq"
"""The name of the connector that is asked for ids of messages, and for topics that no connector put."""
# Ours, in the order in which they are asked for an address. Listed here, because reading entry points takes time
_OURS = {name: f"tiered_index.connectors.{name}.spec:SPEC" for name in ("kafka", "rocketmq", FILES)}
# The scheme of an address. A connector of another package claims addresses by it
_SCHEME = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


class Words(NamedTuple):
    """The words of a connector in texts for people.

    - `queue`: the part of a topic.
    - `offset`: the offset of an entry.
    - `no_message`: the reason why there is no message if no place of messages was given.
    - `no_queues`: the reason why messages can't be read by their place in a queue.
    - `message`, `key`: a message, and what names it in its topic.
    - `in_files`: an entry is shown by its file and row, not by queue and offset.
    """

    queue: str
    offset: str
    no_message: str
    no_queues: str
    message: str = "message"
    key: str = "unique key"
    in_files: bool = False


OTHER = Words(
    "queue",
    "offset",
    "the index has the place of the message, but no copy of it: read it in the source that was ingested",
    "only topics of RocketMQ have queues to read: look up a key",
)
"""The words for entries of no known connector, such as those that a program put."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorSpec:
    """Describes a connector.

    - `name`: its name, as that of its entry point.
    - `title`: its sources, as texts for people name them.
    - `words`: its words in texts for people.
    - `open`: ``module:name`` of the connector (`tiered_index.connectors.contract`), which is loaded when it is needed.
    - `claims`: returns whether an address is one of its own. Raises `InvalidArgument` for an address that probably is
      meant to be one. None: it reads files, which are all addresses that no other connector claims.
    - `version`: that of the facts in the documents of its topics.
    - `offset_space`: what the offsets of its entries count, as the setting of a new index. None: the default.
    - `follows`: whether it has a source that a `Follower` drives.
    - `several`: whether a run may have several addresses.
    - `places`: the form of the place of a message that can be read without an entry, such as
      ``kafka:TOPIC/PARTITION/OFFSET``; it begins with a scheme. None: there is none.
    - `advice`: how a command is told where to read such a place, if the index does not have its topic.
    - `stores`: how the names of its stores of columnar segments begin. Empty: with its name and a colon, as must those
      of a connector of another package, whose queues are closed by it.
    - `queues`: ``module:class`` of a `TopicQueues` (`tiered_index.connectors.contract`). None: there are no queues to
      read, as `Words.no_queues` says.
    - `folder`: returns the folder on this machine that an address names. None: its addresses name none.
    - `options`: a dataclass whose fields are declared by `tiered_index.connectors.options.declare`; None: it has none.
      `ingest` and `serve` have an option ``--NAME-FIELD`` for each field of a connector of another package.
    - `place_options`: those of `options` that name a place of messages without an address. None: there are none.
    """

    name: str
    title: str
    open: str
    claims: Callable[[str], bool] | None
    words: Words = OTHER
    version: int = 1
    offset_space: str | None = None
    follows: bool = True
    several: bool = False
    places: str | None = None
    advice: str | None = None
    stores: tuple[str, ...] = ()
    queues: str | None = None
    folder: Callable[[str], Path] | None = None
    options: type[Any] | None = None
    place_options: type[Any] | None = None

    def has_places(self, scheme: str) -> bool:
        """Return whether places of its messages begin with a scheme, such as ``kafka:``."""
        return bool(scheme) and self.places is not None and self.places.startswith(scheme)


class Registry:
    """The connectors of this package, and of others. Threads: any."""

    def spec(self, name: str, package: str = "") -> ConnectorSpec:
        """Return a connector's spec. Raises `ConfigError` if it is not installed, or can't be loaded.

        `package` is the one to install, by the document of a topic; empty: it is not known.
        """
        if name in _OURS:
            return _spec_at(_OURS[name])
        specs, problems = self._others
        if name not in specs:
            named = [problem for problem in problems if problem.startswith(f"connector {name} ")]
            advice = f"install the package {package or 'that has it'}"
            raise ConfigError(named[0] if named else f"there is no connector {name!r}: {advice}")
        return specs[name]

    def has(self, name: str) -> bool:
        """Return whether a connector is installed, and its spec can be loaded."""
        return name in _OURS or name in self._others[0]

    def is_installed(self, name: str) -> bool:
        """Return whether a connector is installed, also one that can't be loaded."""
        return self.has(name) or any(problem.startswith(f"connector {name} ") for problem in self.problems)

    def of_address(self, address: str) -> ConnectorSpec:
        """Return the spec of the connector that reads an address.

        Connectors of other packages are asked for an address with a scheme (``name:``) that ours don't know. Files are
        all that no connector claims. Raises `ConfigError` if several connectors claim an address.
        """
        for spec in self.ours():
            if spec.claims is not None and spec.claims(address):
                return spec
        claiming = []
        if _SCHEME.match(address):
            claiming = [spec for spec in self.others() if spec.claims is not None and spec.claims(address)]
        if len(claiming) > 1:
            names = " and ".join(spec.name for spec in claiming)
            raise ConfigError(f"{address}: the connectors {names} both claim it: uninstall one of them")
        return claiming[0] if claiming else self.spec(FILES)

    def of_messages(self, address: str) -> ConnectorSpec:
        """Return the spec of the connector that reads messages at an address. Raises as `of_address`.

        A path that no connector claims is one of `OF_OTHERS`, whose disk may not be mounted yet. Raises `ConfigError`
        for another address that none claims.
        """
        spec = self.of_address(address)
        if spec.claims is not None:
            return spec
        if "://" in address:
            scheme = address.partition("://")[0]
            problems = "".join(f" ({problem})" for problem in self.problems)
            raise ConfigError(f"no connector reads messages at {scheme}://: install the package of one{problems}")
        return self.spec(OF_OTHERS)

    def places(self) -> list[str]:
        """Return the forms of places of messages that our connectors read."""
        forms = (spec.places for spec in self.ours())
        return [form for form in forms if form is not None]

    def of_place(self, text: str) -> ConnectorSpec | None:
        """Return the spec of the connector that reads the place of a message (`ConnectorSpec.places`), or None."""
        scheme = text[: text.find(":") + 1]
        specs = self.ours()
        if scheme and not any(spec.has_places(scheme) for spec in specs):
            specs += self.others()
        return next((spec for spec in specs if spec.has_places(scheme)), None)

    def of_store(self, store: str) -> str:
        """Return the name of the connector of a store of columnar segments, also of one that is not installed."""
        return next((spec.name for spec in self.ours() if store.startswith(spec.stores)), store.partition(":")[0])

    def connector(self, name: str) -> Any:
        """Return a `Connector`; it is a `SourceConnector` if its spec says that it `follows`.

        Raises `ConfigError` if it is not installed, or can't be loaded.
        """
        return _loaded(self.spec(name), self.spec(name).open)

    def queues(self, name: str, messages: Any) -> TopicQueues | None:
        """Return what reads the queues of a connector's topics by its message source; None: it has no queues.

        Raises as `connector`.
        """
        spec = self.spec(name)
        return None if spec.queues is None else _loaded(spec, spec.queues)(messages)

    def package(self, name: str) -> str:
        """Return the package that has a connector; empty: this one, or one that is not known."""
        return "" if name in _OURS else self._packages.get(name, "")

    def ours(self) -> list[ConnectorSpec]:
        """Return the specs of connectors of this package."""
        return [self.spec(name) for name in _OURS]

    def others(self) -> list[ConnectorSpec]:
        """Return the specs of connectors of other packages, by name."""
        return [spec for _, spec in sorted(self._others[0].items())]

    def refuse(self, name: str, problem: str) -> None:
        """Take a connector of another package for one that can't be loaded."""
        specs, problems = self._others
        problems.append(f"connector {name} ({specs.pop(name).open}) can't be loaded: {problem}")

    @property
    def problems(self) -> tuple[str, ...]:
        """The connectors of other packages that can't be loaded, with the reasons, once these packages were asked."""
        return tuple(self._others[1]) if "_others" in vars(self) else ()

    @cached_property
    def _packages(self) -> dict[str, str]:
        """The packages of the connectors of others, by connector."""
        from importlib.metadata import entry_points

        points = entry_points(group=GROUP)
        return {point.name: point.dist.name for point in points if point.dist is not None}

    @cached_property
    def _others(self) -> tuple[dict[str, ConnectorSpec], list[str]]:
        """The specs of other packages by name, and the problems of those that can't be loaded."""
        specs: dict[str, ConnectorSpec] = {}
        problems: list[str] = []
        if not _may_have_others():
            return specs, problems
        # imported on use: it takes a tenth of the time of a command's help
        from importlib.metadata import entry_points

        for entry_point in entry_points(group=GROUP):
            if (name := entry_point.name) in _OURS:
                continue
            try:
                spec = entry_point.load()
                if not isinstance(spec, ConnectorSpec) or spec.name != name:
                    raise TypeError(f"it is not a ConnectorSpec with the name {name!r}")
                if spec.claims is None:
                    raise TypeError("it claims no addresses")
            except Exception as error:  # noqa: BLE001 - whatever the import of another package raises
                problems.append(f"connector {name} ({entry_point.value}) can't be loaded: {error}")
            else:
                specs[name] = spec
        return specs, problems


def _may_have_others() -> bool:
    """Return whether another package may have connectors: whether the text of its entry points names the group.

    `importlib.metadata` answers the same in five times the time.
    """
    if any(hasattr(finder, "find_distributions") and finder is not PathFinder for finder in sys.meta_path):
        return True
    for folder in sys.path:
        try:
            names = os.listdir(folder or os.curdir)
        except NotADirectoryError:
            # it may be a zip file with packages
            return True
        except OSError:
            continue
        for name in names:
            if name.endswith((".dist-info", ".egg-info")) and not _is_ours(name):
                with contextlib.suppress(OSError):
                    if GROUP in Path(folder, name, "entry_points.txt").read_text(errors="replace"):
                        return True
    return False


def _is_ours(name: str) -> bool:
    """Return whether a folder has the entry points of this package, also that of a clone, which has no version."""
    return name.startswith("tiered_index-") or name == "tiered_index.egg-info"


def _loaded(spec: ConnectorSpec, place: str) -> Any:
    try:
        return pkgutil.resolve_name(place)
    except TieredIndexError:
        raise
    except Exception as error:  # whatever the import of another package raises
        raise ConfigError(f"connector {spec.name} ({place}) can't be loaded: {error}") from error


def _spec_at(place: str) -> ConnectorSpec:
    spec: Any = pkgutil.resolve_name(place)
    assert isinstance(spec, ConnectorSpec)
    return spec


CONNECTORS = Registry()
"""The connectors of this process."""
