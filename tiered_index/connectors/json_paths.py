"""Reads fields of JSON values by JMESPath: only those of plain paths are decoded. Pure; any thread."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any, Self, cast

import msgspec

from tiered_index.connectors.json_numbers import number_text
from tiered_index.errors import ConfigError, InvalidArgument, install_hint
from tiered_index.format.keys.spelling import named_key

try:
    import jmespath
except ModuleNotFoundError:  # boto3 brings it, but does not promise to
    jmespath = cast("Any", None)

Path = tuple[str, ...]


class Unclear(Exception):
    """The value needs a whole decoder: it is no object, no plain JSON, or has a number whose text is lost."""


def key_texts(value: Any) -> Iterator[str]:
    """Yield the keys of a JSON value: a text, a number as it was written, true or false, each element of an array."""
    # no recursion: arrays may be nested deeper than the stack of Python
    left = [value]
    while left:
        member = left.pop()
        if isinstance(member, list):
            left += reversed(member)
        elif isinstance(member, str):
            yield member
        elif member is not None and not isinstance(member, dict):
            yield number_text(member)


def compiled_path(path: str, shown: str, *, check: bool = True) -> Any:
    """Return a compiled JMESPath. `shown` names it in errors; `check`: refuse functions that do not exist.

    Raises `InvalidArgument`, and `ConfigError` if jmespath is missing.
    """
    if jmespath is None:
        raise ConfigError(f"{shown} needs the extra 'kafka' (jmespath is missing): {install_hint('kafka')}")
    try:
        compiled = jmespath.compile(path)
        nodes = [compiled.parsed] if check else []
        while nodes:
            node = nodes.pop()
            nodes += [child for child in node["children"] if isinstance(child, dict)]
            if node["type"] == "function_expression":
                # else an unknown function, or a wrong number of arguments, is an error of each record
                with contextlib.suppress(jmespath.exceptions.JMESPathTypeError):
                    jmespath.functions.Functions().call_function(node["value"], [None] * len(node["children"]))
    except jmespath.exceptions.JMESPathError as error:
        raise InvalidArgument(f"{shown} can't be read as JMESPath: {str(error).splitlines()[0]}") from error
    return compiled


def searched(path: Any, document: Any) -> Any:
    """Return the member of a document at a compiled JMESPath; None also if the path does not accept the document."""
    # in jmespath's own checks or not
    with contextlib.suppress(jmespath.exceptions.JMESPathError, TypeError, ValueError, ArithmeticError, RecursionError):
        return path.search(document)
    return None


def plain_path(node: dict[str, Any]) -> Path | None:
    """Return the names of a parsed JMESPath of names alone, such as ``order.id``; None: it is another expression."""
    if node["type"] == "field":
        return (node["value"],)
    if node["type"] != "subexpression":
        return None
    parts = [plain_path(child) for child in node["children"]]
    return None if None in parts else tuple(name for part in parts if part is not None for name in part)


def fields_of(node: dict[str, Any]) -> set[str]:
    """Return the names of all fields in a parsed JMESPath."""
    names, nodes = set[str](), [node]
    while nodes:
        inner = nodes.pop()
        names |= {inner["value"]} if inner["type"] == "field" else set()
        nodes += [child for child in inner["children"] if isinstance(child, dict)]
    return names


class FieldReader:
    """Reads the keys at plain paths of objects. A decoder skips all other fields, without making objects of them.

    `names` are those of the keys at each path, as of `spelling.split_name`; empty: no keys have names.
    """

    def __init__(self, paths: Sequence[Path], names: Sequence[str] = ()) -> None:
        tree: dict[str, Any] = {}
        # a path that is the begin of another one ends at a whole object, where the other path continues by names
        ends = set(paths)
        self._ways: list[tuple[Path, Path]] = []
        self._names = [*names] or [""] * len(paths)
        for path in paths:
            cut = next((length for length in range(1, len(path)) if path[:length] in ends), len(path))
            node, way = tree, []
            for name in path[:cut]:
                # the names of fields must be Python's
                field, node = node.setdefault(name, (f"field{len(node)}", {}))
                way.append(field)
            self._ways.append((tuple(way), path[cut:]))
        decoder = msgspec.json.Decoder(_structure(tree), float_hook=str)
        self._decode, self._decode_lines = decoder.decode, decoder.decode_lines

    @classmethod
    def of(cls, expressions: Sequence[Any], names: Sequence[str] = ()) -> Self | None:
        """Return the reader of compiled JMESPaths. None: there are none, or not all are plain paths."""
        paths = [path for expression in expressions if (path := plain_path(expression.parsed)) is not None]
        return cls(paths, names) if paths and len(paths) == len(expressions) else None

    def only_text(self, value: bytes) -> str | None:
        """Return the key of a value at the only path, if it is a text of ASCII; None: ask `keys_of`."""
        (way, names), *_ = self._ways
        try:
            member = self._decode(value)
            for field in way:
                member = getattr(member, field)
        except (msgspec.MsgspecError, RecursionError, ValueError, AttributeError):
            return None
        is_plain_text = type(member) is str and not names and member.isascii()
        return named_key(self._names[0], member) if is_plain_text else None

    def members_of_lines(self, lines: bytes) -> list[list[Any]]:
        """Return for each path the member of each line's object; None: there is none. Raises `Unclear`.

        A decimal number is a text, as it was written; -0 is 0. Lines are not checked to have one object each.
        """
        try:
            documents = self._decode_lines(lines)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise Unclear from error
        members = []
        for fields, names in self._ways:
            values = list(map(attrgetter(fields[0]), documents))
            for field in fields[1:]:
                values = [getattr(value, field, None) for value in values]
            for name in names:
                values = [value.get(name) if isinstance(value, dict) else None for value in values]
            members.append(values)
        return members

    def keys_of(self, value: bytes) -> list[str]:
        """Return the keys of a JSON object, by path. Raises `Unclear`."""
        try:
            document = self._decode(value)
        except (msgspec.MsgspecError, RecursionError, ValueError) as error:
            raise Unclear from error
        keys: list[str] = []
        for (fields, below), name in zip(self._ways, self._names, strict=True):
            member = document
            for field in fields:
                member = getattr(member, field, None)
            for member_name in below:
                member = member.get(member_name) if isinstance(member, dict) else None
            if type(member) is str:
                keys.append(named_key(name, member))
            elif member is not None:
                try:
                    texts = list(key_texts(member))
                except ValueError as error:  # Python makes no text of so many digits
                    raise Unclear from error
                if "0" in texts:  # perhaps it was -0
                    raise Unclear
                keys += [named_key(name, text) for text in texts]
        return keys


def _structure(tree: dict[str, Any]) -> Any:
    """Return the type of an object that has the fields of `tree`, each of them optional."""
    fields = [
        (
            field,
            _structure(below) | str | int | float | bool | list[Any] | None if below else Any,
            msgspec.field(default=None, name=name),
        )
        for name, (field, below) in tree.items()
    ]
    return msgspec.defstruct("Fields", fields, gc=False)
