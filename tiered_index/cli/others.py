"""The options that connectors of other packages declare, as options of `ingest` and `serve`.

The field FIELD of the connector NAME is the option ``--NAME-FIELD``, so no option of another connector has its flag.
"""

from __future__ import annotations

import typing
from collections.abc import Collection, Iterable, Iterator
from dataclasses import fields, make_dataclass
from typing import Any

from tiered_index.cli.options import flag_of
from tiered_index.connectors.options import Declared, declare
from tiered_index.connectors.registry import CONNECTORS, ConnectorSpec


def other_options(flags: Collection[str]) -> type | None:
    """Return a dataclass with the options of each connector of another package; None: none has any.

    `flags` are those of the command. A connector whose options can't be declared is a problem of the registry.
    """
    groups = []
    for spec in CONNECTORS.others():
        try:
            if spec.options is not None:
                groups.append((_name_of(spec), _group(spec, spec.options, flags)))
        except Exception as error:  # noqa: BLE001 - whatever the annotations of another package raise
            CONNECTORS.refuse(spec.name, f"its options: {error}")
    return make_dataclass("OtherOptions", groups, frozen=True) if groups else None


def groups_of(others: Any) -> Iterator[tuple[str, Any]]:
    """Yield the options of each connector of another package, each with the title of the connector."""
    for spec in CONNECTORS.others() if others is not None else ():
        if (group := getattr(others, _name_of(spec), None)) is not None:
            yield spec.title, group


def options_of(spec: ConnectorSpec, groups: Iterable[Any], others: Any) -> Any:
    """Return the options of one connector as it declares them; None: it has none.

    `groups` are those of this package's connectors, `others` those of other packages'.
    """
    if spec.options is None:
        return None
    if (ours := next((group for group in groups if isinstance(group, spec.options)), None)) is not None:
        return ours
    group, name = getattr(others, _name_of(spec), None), _name_of(spec)
    values = {} if group is None else {f.name: getattr(group, f"{name}_{f.name}") for f in fields(spec.options)}
    return spec.options(**values)


def _name_of(spec: ConnectorSpec) -> str:
    return spec.name.replace("-", "_")


def _group(spec: ConnectorSpec, options: type, flags: Collection[str]) -> type:
    """Return the options of a connector with names and flags that start with its name. Raises `TypeError`."""
    hints, declared = typing.get_type_hints(options, include_extras=True), list[tuple[str, Any, Any]]()
    for f in fields(options):
        option = f.metadata.get("option")
        if not isinstance(option, Declared):
            raise TypeError(f"{f.name} is not made by tiered_index.connectors.options.declare")
        name, prefix = f"{_name_of(spec)}_{f.name}", f"--{spec.name}-"
        for flag in option.param_decls or (flag_of(name, None),):
            if not flag.startswith(prefix) or flag.partition("/")[0] in flags:
                raise TypeError(f"the flag {flag} of {f.name} must begin with {prefix}, and be no other option's")
        rules = {"rich_help_panel": spec.title, **option.rules}
        declared.append((name, hints[f.name], declare(option.default, *option.param_decls, **rules)))
    return make_dataclass(f"OptionsOf{spec.name.title()}", declared, frozen=True)
