"""One printer for people and programs: tables and lines, or JSON. One thread.

Answers go to stdout; notes, logs and errors to stderr. With `as_json` stdout holds one JSON document (or NDJSON where a
command says so), and an error is one JSON line on stderr. JSON is printable ASCII, so any text, lone surrogates too,
passes any pipe and any terminal.

Topics, keys, names and servers' messages are untrusted text: all that is written here, logs too, goes through
`printable`, and markup is not interpreted.
"""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Iterable, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiered_index.errors import CorruptFile, LockHeld, TieredIndexError

__all__ = [
    "PrintableFormatter",
    "Printer",
    "counted",
    "describe_error",
    "error_document",
    "human_bytes",
    "human_count",
    "human_seconds",
    "printable",
]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Width of tables that go to a file: none of them is wider.
_WIDE = 100_000


def printable(text: str) -> str:
    """Return `text` as one line of which a terminal takes nothing for a command, and nothing turns the reading order.

    What is not printable by Unicode (C0 and C1 controls, line ends, marks of direction, surrogates) is written as
    Python's escape.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _printable_lines(text: str, indent: str = "") -> str:
    """Return `text` with its line ends, behind which `indent` stands, and tabs, all else as `printable`."""
    return f"\n{indent}".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


class PrintableFormatter(logging.Formatter):
    """A log's lines as `printable`; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Return the line without a traceback."""
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the line and its traceback."""
        return _printable_lines(super().format(record))


def human_bytes(size_bytes: float) -> str:
    """Return a size as people read it: ``7.8 MiB``."""
    for unit in _UNITS:
        if abs(size_bytes) < 1024 or unit == _UNITS[-1]:
            return f"{size_bytes:,.0f} B" if unit == "B" else f"{size_bytes:,.1f} {unit}"
        size_bytes /= 1024
    raise AssertionError("unreachable")


def human_count(count: float) -> str:
    """Return a count with separators; fractions only where they say something."""
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:,.1f}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 file``, ``2 files``, ``3 entries``."""
    return f"{human_count(count)} {noun if count == 1 else plural or noun + 's'}"


def human_seconds(seconds: float) -> str:
    """Return a duration as people read it: ``0.85 ms``, ``12.3 s``, ``2 min 05 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.{0 if seconds >= 0.1 else 2}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def describe_error(error: TieredIndexError) -> dict[str, Any]:
    """Return what an error carries beside its message, JSON-ready."""
    details: dict[str, Any] = {"exit_code": error.exit_code}
    if isinstance(error, LockHeld):
        details |= {"pid": error.pid, "host": error.host}
    if isinstance(error, CorruptFile):
        details |= {"file": error.file, "offset": error.offset}
        # a range of a log that is damaged, deleted or rewritten says where it begins and ends
        details |= {
            name: value for name in ("begin", "end", "messages") if (value := getattr(error, name, None)) is not None
        }
    return details


def error_document(error: TieredIndexError) -> dict[str, Any]:
    """Return an error as a field of a JSON document, as it stands on stderr, too."""
    return {"error": {"type": type(error).__name__, "message": str(error), **describe_error(error)}}


class Printer:
    """Where a command's words go."""

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a test's stand-in has no encoding
                stream.reconfigure(errors="backslashreplace")
        self._terminal = sys.stdout.isatty()

    def document(self, document: dict[str, Any]) -> None:
        """Print the one JSON document of a command."""
        sys.stdout.write(_json(document, indent=2 if self._terminal else None))

    def record(self, record: dict[str, Any]) -> None:
        """Print one line of NDJSON."""
        sys.stdout.write(_json(record))

    def line(self, text: str = "") -> None:
        """Print one line of text."""
        sys.stdout.write(printable(text) + "\n")

    def lines(self, text: str) -> None:
        """Print a text of several lines, such as a message's body.

        Those behind the first are indented, so that they can't pass for lines of the command.
        """
        sys.stdout.write(_printable_lines(text, "    ") + "\n")

    def table(
        self, columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None, right: str = ""
    ) -> None:
        """Print a table; columns whose names are in `right` (separated by blanks) are aligned to the right."""
        heading = Text(printable(title)) if title is not None else None
        table = Table(box=SIMPLE_HEAD, title=heading, title_justify="left", pad_edge=False)
        for name in columns:
            table.add_column(name, justify="right" if name in right.split() else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text("" if cell is None else printable(str(cell))) for cell in row))
        self._console().print(table)

    def facts(self, facts: dict[str, object], *, title: str | None = None) -> None:
        """Print names and values, one a line; what is None is left out."""
        if title:
            self.line(title)
        width = max(map(len, facts), default=0)
        for name, value in facts.items():
            if value is not None:
                self.line(f"  {name:<{width}}  {value}")

    def note(self, text: str) -> None:
        """Tell the user something that is no answer; silent with --quiet."""
        if not self.quiet:
            sys.stderr.write(printable(text) + "\n")

    def error(self, kind: str, message: str, **details: Any) -> None:
        """Report an error on stderr: one line, or one JSON document."""
        if self.as_json:
            sys.stderr.write(_json({"error": {"type": kind, "message": message, **details}}))
        else:
            sys.stderr.write(_printable_lines(f"tiered-index: {message}", "    ") + "\n")

    def error_line(self, text: str) -> None:
        """Add a line for people to an error that was reported."""
        if not self.as_json:
            sys.stderr.write(f"  {printable(text)}\n")

    def traceback(self, error: BaseException) -> None:
        """Show on stderr where an error came from."""
        sys.stderr.write(_printable_lines("".join(traceback.format_exception(error)).removesuffix("\n")) + "\n")

    def _console(self) -> Console:
        return Console(file=sys.stdout, width=None if self._terminal else _WIDE, highlight=False, soft_wrap=False)


def _json(document: dict[str, Any], indent: int | None = None) -> str:
    # of ASCII's controls JSON leaves this one as it is
    return json.dumps(document, indent=indent).replace("\x7f", "\\u007f") + "\n"
