"""The commands in docs/cli.md, made from the argument parsers of `tiered-index`."""

from __future__ import annotations

import re
import types
import typing
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from tiered_index.cli.main import LateCommand, app

__all__ = ["commands"]

# an option that this many commands share, with the same help, appears once
_COMMON = 8
_NAMES = {int: "N", float: "N", str: "TEXT", Path: "PATH"}
_EXAMPLES = "[bold]Examples[/bold]"
_OWN = ("--help", "--install-completion", "--show-completion")


def all_commands(group: Any = None, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the words of each command, and the command. Groups have no part of their own."""
    group = group or typer.main.get_command(app)
    group = group.loaded() if isinstance(group, LateCommand) else group
    below = getattr(group, "commands", {})
    if not below:
        yield words, group
    for name, command in below.items():
        yield from all_commands(command, (*words, name))


def commands() -> str:
    """Return a table of the commands, a table of the options that many of them share, and a section for each."""
    listed = list(all_commands())
    heads = [(" ".join(words), (command.help or "").strip().partition("\n\n")[0]) for words, command in listed]
    names = [f"| [`{name}`](#{name.replace(' ', '-')}) | {_marked(' '.join(head.split()))} |" for name, head in heads]
    counts = Counter(_row(option) for _, command in listed for option in command.params)
    common = [row for row, count in counts.items() if count >= _COMMON]
    parts = ["| command | purpose |\n|---|---|\n" + "\n".join(names) + "\n"]
    parts += ["## Options of many commands\n", _table(common)]
    for words, command in listed:
        head, examples, more = _parts_of(command.help or "")
        rows = [_row(option) for option in command.params]
        shared = ", ".join(f"`{row[0].split()[0].rstrip(',')}`" for row in rows if row in common)
        arguments = " ".join(option.metavar or option.name.upper() for option in command.params if _is_argument(option))
        parts += [f"## {' '.join(words)}\n", f"{_marked(head)}\n"]
        parts.append(f"```text\ntiered-index {' '.join(words)} [OPTIONS] {arguments}".rstrip() + "\n```\n")
        parts += ["```text\n" + "\n".join(examples) + "\n```\n"] * bool(examples)
        parts += [f"{_marked(more)}\n"] * bool(more)
        own = [row for row in rows if row not in common]
        parts += [_table(own)] * bool(own)
        parts += [f"Shared options: {shared}.\n"] * bool(shared)
    return "\n" + "\n".join(parts) + "\n"


def _parts_of(text: str) -> tuple[str, list[str], str]:
    """Return the first sentence of a command's help, its examples, which are indented, and the rest."""
    head, *paragraphs = text.strip().split("\n\n")
    examples = [paragraph.strip() for paragraph in paragraphs if paragraph.startswith(" ")]
    more = [paragraph for paragraph in paragraphs if not paragraph.startswith(" ") and paragraph != _EXAMPLES]
    return head, examples, "\n\n".join(more)


def _marked(text: str) -> str:
    """Return the text with its options as code, except those within code."""
    return re.sub(r"`[^`]*`|(?<![\w-])--[a-z][a-z-]*", lambda m: m[0] if m[0][0] == "`" else f"`{m[0]}`", text)


def _is_argument(option: Any) -> bool:
    return not any(name.startswith("-") for name in option.opts)


def _row(option: Any) -> tuple[str, str]:
    names = [*option.opts, *option.secondary_opts]
    value = "" if getattr(option, "is_flag", False) or _is_argument(option) else f" {_value(option)}"
    name = option.metavar or option.name.upper() if _is_argument(option) else ", ".join(names)
    text = (option.help or "").strip()
    default = option.show_default if isinstance(getattr(option, "show_default", None), str) else option.default
    if isinstance(default, int | float | str) and not isinstance(default, bool) and default != "" and value != "":
        text += "" if "efault" in text else f" Default: {default}."
    return f"{name}{value}", text


def _value(option: Any) -> str:
    if option.metavar:
        return str(option.metavar)
    annotation = option.type_descriptor.annotation
    inner = [kind for kind in typing.get_args(annotation) if kind is not types.NoneType]
    if typing.get_origin(annotation) is typing.Literal:
        return "|".join(map(str, inner))
    return _NAMES.get(inner[0] if inner else annotation, "TEXT")


def _table(rows: list[tuple[str, str]]) -> str:
    lines = ["| option | meaning |", "|---|---|"]
    for name, text in rows:
        if not name.startswith(_OWN):
            escaped = name.replace("|", "\\|")
            lines.append(f"| `{escaped}` | {_marked(text).replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"
