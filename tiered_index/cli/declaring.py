"""Declares commands for typer: their options and their help. The code of a command is loaded when it runs.

So the help of a command loads no library of the engine.
"""

from __future__ import annotations

import dataclasses
import gc
import inspect
import pkgutil
import re
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import typer
from typer.models import OptionInfo

from tiered_index.cli.loading import loaded
from tiered_index.cli.options import flag_of
from tiered_index.connectors.options import Declared, declare
from tiered_index.connectors.registry import CONNECTORS

T = TypeVar("T")
_common = partial(declare, rich_help_panel="Common options")


@dataclass(frozen=True)
class CommonOptions:
    """The options of every command."""

    root: Path | None = _common(None, help="Local folder of the index's writer.")
    storage: list[str] | None = _common(
        None,
        help="Storage of the index, such as s3://bucket/prefix or file:///dir. "
        "`query`, `topics` and `serve` accept several.",
    )
    config: Path | None = _common(None, help="TOML file of settings.")
    settings: list[str] | None = _common(
        None, "--set", metavar="NAME=VALUE", help="Setting, for example cache_dir=DIR or s3.region=NAME. Repeatable."
    )
    json: bool = _common(False, "--json", help="Print JSON to stdout, and errors as JSON to stderr.")
    quiet: bool = _common(
        False, "--quiet", "-q", help="Print no progress, no notes, and no summary of what was put or found."
    )
    verbose: bool = _common(False, "--verbose", "-v", help="Log each step.")
    debug: bool = _common(False, "--debug", help="Log everything, with tracebacks.")


_COMMON = inspect.Parameter("common", inspect.Parameter.KEYWORD_ONLY, annotation=CommonOptions)


def done_by(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that makes a typer command of a function without a body, which declares options and help.

    `name` is that of the function that does the work, such as ``tiered_index.cli.write.export:export``. It gets
    a `Session` and the declared parameters by name, and returns the exit code.
    """
    return lambda declared: made_command(declared, _parameters(declared), partial(pkgutil.resolve_name, name))


def done_with_others(name: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator like `done_by`; the function also gets `others`, the options of connectors of other packages.

    `needs_others(words)` of the command returns whether a command line asks for help, or has options that the command
    does not know; then `with_others()` returns the command with theirs. Other lines need not look for packages.
    """

    def decorator(declared: Callable[..., None]) -> Callable[..., None]:
        parameters, load = _parameters(declared), partial(pkgutil.resolve_name, name)
        alone: Any = made_command(declared, parameters, load)

        def flags() -> set[str]:
            return _each_flag(alone.__signature__.parameters.values())

        def needs_others(words: Sequence[str]) -> bool:
            names = {word.partition("=")[0] for word in words if word.startswith("-")}
            return not names.isdisjoint(("-h", "--help")) or any(name.startswith("--") for name in names - flags())

        def with_others() -> Callable[..., None]:
            if not CONNECTORS.others():
                return declared_alone
            # imported on use: few have such connectors
            from tiered_index.cli.others import other_options

            if (group := other_options(flags())) is None:
                return declared_alone
            others = inspect.Parameter("others", inspect.Parameter.KEYWORD_ONLY, annotation=group)
            return made_command(declared, [*parameters, others], load)

        alone.needs_others, alone.with_others = needs_others, with_others
        declared_alone: Callable[..., None] = alone
        return declared_alone

    return decorator


def command(function: Callable[..., int]) -> Callable[..., None]:
    """Return `function`, which gets a `Session` first, as a typer command; its result is the exit code."""
    return made_command(function, _parameters(function)[1:], lambda: function)


def made_command(
    declared: Callable[..., object], parameters: list[inspect.Parameter], load: Callable[[], Callable[..., int]]
) -> Callable[..., None]:
    """Return the typer command of a declared function; `load` returns the function that does the work.

    If the type of a parameter is a dataclass, each of its fields is an option, or a dataclass of further options.
    """
    options = [option for p in [*parameters, _COMMON] for option in _options_of(p)]
    groups = {p.name: p.annotation for p in parameters if _options_of(p) != [p]}

    def wrapper(**values: Any) -> None:
        work, run = loaded(declared.__name__, lambda: (load(), pkgutil.resolve_name("tiered_index.cli.session:run")))
        if not gc.isenabled():
            # `__main__` turned it off. Loading leaves no garbage; from here on there may be some.
            gc.freeze()
            gc.enable()
        flags = _flags(options, values)
        of_every_command = group_of(CommonOptions, values)
        if code := run(work, of_every_command, groups, flags, values):
            raise typer.Exit(code)

    # the terminal's width breaks the lines of the help, so the source's line breaks within a paragraph go
    wrapper.__doc__ = re.sub(r"(?<!\n)\n *(?!\n)", " ", inspect.cleandoc(declared.__doc__ or ""))
    wrapper.__name__, wrapper.__module__ = declared.__name__, declared.__module__
    wrapper.__annotations__ = {p.name: p.annotation for p in options}
    wrapper.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    return wrapper


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    hints = typing.get_type_hints(function, include_extras=True)
    return [p.replace(annotation=hints[p.name]) for p in inspect.signature(function).parameters.values()]


def _options_of(parameter: inspect.Parameter) -> list[inspect.Parameter]:
    """Return the options of a parameter: those of the fields of a dataclass, or the parameter itself."""
    if not dataclasses.is_dataclass(kind := parameter.annotation):
        return [parameter]
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = dataclasses.fields(kind)
    own = [parameter.replace(name=f.name, default=_default_of(f), annotation=hints[f.name]) for f in fields]
    return [option for field in own for option in _options_of(field)]


def _default_of(field: dataclasses.Field[Any]) -> Any:
    """Return the default of an option's parameter, as typer takes it."""
    if (declared := field.metadata.get("option")) is None:
        return field.default
    assert isinstance(declared, Declared)
    return typer.Option(declared.default, *declared.param_decls, **declared.rules)


def group_of(kind: Any, options: dict[str, Any]) -> Any:
    """Return a dataclass of options, whose values leave `options`; its fields may be such groups."""
    hints = typing.get_type_hints(kind)
    values = {
        f.name: group_of(hints[f.name], options) if dataclasses.is_dataclass(hints[f.name]) else options.pop(f.name)
        for f in dataclasses.fields(kind)
    }
    return kind(**values)


def _each_flag(parameters: Iterable[inspect.Parameter]) -> set[str]:
    """Return all flags of options."""
    flags = set[str]()
    for p in parameters:
        for info in (p.default, *getattr(p.annotation, "__metadata__", ())):
            if isinstance(info, OptionInfo):
                # within Annotated, typer stores the first declaration as the default
                first = [info.default] if isinstance(info.default, str) else []
                declared = [flag for flag in (*first, *(info.param_decls or ())) if flag.startswith("-")]
                plain = p.name.replace("_", "-")
                flags |= {flag for pair in declared or [f"--{plain}/--no-{plain}"] for flag in pair.split("/")}
    return flags


def _flags(parameters: list[inspect.Parameter], values: Mapping[str, Any]) -> dict[str, str]:
    """Return the flags of a command by the names that errors use for its options."""
    flags: dict[str, str] = {}
    for p in parameters:
        infos = (p.default, *getattr(p.annotation, "__metadata__", ()))
        if (info := next((i for i in infos if isinstance(i, OptionInfo)), None)) is not None:
            flag = flag_of(p.name, info)
            names = [p.name] if "_" in p.name else []
            if values[p.name] is not None:
                names += [f"{p.name}_ms", f"{p.name}_s", f"setting {p.name}", f"{p.name} must be"]
            flags |= {name: flag + name.removeprefix(p.name) if " must" in name else flag for name in names}
    return flags
