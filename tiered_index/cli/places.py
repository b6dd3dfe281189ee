"""The places of messages that options of commands name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, NamedTuple

from tiered_index.connectors.registry import CONNECTORS, ConnectorSpec


class FollowedSource(NamedTuple):
    """The source that a command follows: its connector, the options of that, and its address."""

    spec: ConnectorSpec
    options: Any
    address: str


def opened_places(store: str | None, *options: Any, followed: FollowedSource | None = None) -> dict[str, Any]:
    """Open the messages at an address, at the place of a source, and where `options` say: `places` of `MessageSources`.

    Raises as `Connector.place`.
    """
    places: dict[str, Any] = {}
    if store is not None:
        name = CONNECTORS.of_messages(store).name
        places[name] = CONNECTORS.connector(name).place(None, store)
    if followed is not None and followed.spec.name not in places:
        places[followed.spec.name] = CONNECTORS.connector(followed.spec.name).place(followed.options, followed.address)
    for spec in CONNECTORS.ours():
        for group in options:
            if spec.name not in places and _names_place(spec, group):
                places[spec.name] = CONNECTORS.connector(spec.name).place(group, None)
    return places


def _names_place(spec: ConnectorSpec, group: Any) -> bool:
    """Return whether options are those of a connector, and one that names a place is given."""
    kind = spec.place_options
    if kind is None or not isinstance(group, kind):
        return False
    return any(getattr(group, option.name) != option.default for option in fields(kind))
