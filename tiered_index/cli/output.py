"""The output of commands: tables, fields and lines for people, JSON for programs. One thread.

Answers are written to stdout; notes, logs and errors to stderr. JSON is printable ASCII, so that any pipe accepts it.
Topics, keys, names and servers' messages are untrusted: all text, also of logs, passes through `printable`, and markup
is not interpreted.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import re
import shutil
import sys
import traceback
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TextIO

from tiered_index.encoding import json_text
from tiered_index.errors import CorruptFile, DiskFull, LockHeld, TieredIndexError, did_you_mean
from tiered_index.tracing import request_id
from tiered_index.types import format_time

if TYPE_CHECKING:
    from rich.table import Table

    from tiered_index.service.log.records import StoredObject

_TIMES = re.compile(r"\b(begin_ms|end_ms) (\d{1,15})\b")
# Logger of commands' notes
_NOTES = logging.getLogger("tiered_index.cli")
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
# Wider than any table
_WIDE = 100_000
# Widest table, outside a terminal, that people can read
_READABLE = 120
# Most rows whose cells are folded to fit a terminal; a longer table leaves that to the terminal
_MOST_FOLDED = 1_000


def printable(text: str) -> str:
    """Return `text` as one line without terminal commands and marks that change the reading order.

    Characters that Unicode does not count as printable (C0 and C1 controls, line ends, marks of direction, surrogates)
    become Python's escapes.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


def _printable_lines(text: str, indent: str = "") -> str:
    """Return `text` through `printable`, except for tabs and line ends; `indent` follows each line end."""
    return f"\n{indent}".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


class PrintableFormatter(logging.Formatter):
    """Formats log lines through `printable`; a traceback keeps its lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - the base class's name
        """Return the line without a traceback."""
        return printable(super().formatMessage(record))

    def format(self, record: logging.LogRecord) -> str:
        """Return the line and its traceback."""
        return _printable_lines(super().format(record))


class JsonFormatter(logging.Formatter):
    """Formats log records as JSON lines: time, level, logger, message, request id, and the members of `fields`."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "time": format_time(int(record.created * 1000)),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request := request_id.get()) is not None:
            line["request_id"] = request
        line |= getattr(record, "fields", {})
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return json_text(line)


def human_bytes(size_bytes: float) -> str:
    """Return a size for people: ``7.8 MiB``."""
    unit = 0
    while abs(size_bytes) >= 1024 and unit < len(_UNITS) - 1:
        size_bytes, unit = size_bytes / 1024, unit + 1
    return f"{size_bytes:,.1f} {_UNITS[unit]}" if unit else f"{size_bytes:,.0f} B"


def human_count(count: float) -> str:
    """Return a count with separators; small counts that are not whole have one decimal."""
    return f"{count:,.0f}" if count >= 100 or count == int(count) else f"{count:,.1f}"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Return a number with its noun: ``1 file``, ``2 files``, ``3 entries``."""
    return f"{human_count(count)} {noun if count == 1 else plural or noun + 's'}"


def unknown_topic(topic: str, known: Iterable[str]) -> str:
    """Return the hint that no file has a topic or pattern; `known` are the topics of files."""
    return f"no file that was read has topic {topic!r}{did_you_mean(topic, known)}"


def states(counts: Mapping[str, int]) -> str:
    """Return counts by state as text: ``2 unsealed, 9 uploaded``; empty for none."""
    return ", ".join(f"{count} {state}" for state, count in sorted(counts.items()))


def human_seconds(seconds: float) -> str:
    """Return a duration for people: ``0.85 ms``, ``12.3 s``, ``2 min 05 s``."""
    if seconds < 1:
        return f"{seconds * 1000:.{0 if seconds >= 0.1 else 2}f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{int(seconds // 60)} min {int(seconds % 60):02d} s"


def likely_seconds(what: str, time_ms: int, verb: str = "ends") -> str | None:
    """Return a hint that a time before 1973 was perhaps meant as seconds; None for later times."""
    if time_ms >= 10**11:
        return None
    question = f"{what} {verb} at {format_time(time_ms)}: did you mean milliseconds?"
    return f"{question} {time_ms} seconds are {time_ms * 1000}" if time_ms else question


def describe_object(stored: StoredObject) -> dict[str, Any]:
    """Return the description of a stored object for JSON; times are those of its first and last second."""
    return {
        "object": stored.name,
        "entries": stored.count,
        "bytes": stored.size_bytes,
        "begin_ms": stored.second_min * 1000,
        "end_ms": stored.second_max * 1000,
    }


def describe_error(error: TieredIndexError) -> dict[str, Any]:
    """Return the fields of an error in addition to its message, for JSON."""
    details: dict[str, Any] = {"exit_code": error.exit_code}
    if isinstance(error, LockHeld):
        details |= {"pid": error.pid, "host": error.host}
    if isinstance(error, CorruptFile):
        details |= {"file": error.file, "offset": error.offset}
        # the range of a log that is damaged, deleted or rewritten
        details |= {
            name: value for name in ("begin", "end", "messages") if (value := getattr(error, name, None)) is not None
        }
    return details


def error_document(error: TieredIndexError) -> dict[str, Any]:
    """Return an error as a field of a JSON document, in the form that is also written to stderr."""
    return {"error": {"type": type(error).__name__, "message": str(error), **describe_error(error)}}


class Output:
    """The output of a command: a table or JSON on stdout, notes on stderr.

    A command passes its result in both forms: a document for programs (`answer`), and lines, fields and tables for
    people. `as_json` selects the form that is written, so commands need not check it.
    """

    def __init__(self, *, as_json: bool, quiet: bool = False) -> None:
        self.as_json = as_json
        self.quiet = quiet
        # Whether notes are log records for `JsonFormatter`
        self.logs_json = False
        # The flags of the present command by the library's names
        self.flags: dict[str, str] = {}
        for stream in (sys.stdout, sys.stderr):
            if hasattr(stream, "reconfigure"):  # a test's stream has no encoding
                stream.reconfigure(errors="backslashreplace")
        self._terminal = _is_terminal(sys.stdout)

    def answer(self, document: dict[str, Any], *, streamed: bool = False) -> None:
        """Write the one JSON document of a command, or the last line of its NDJSON."""
        if self.as_json:
            if isinstance(error := document.get("error"), dict):
                document = document | {"error": error | {"message": self.in_flags(error["message"])}}
            self._write(json_text(document, indent=2 if self._terminal and not streamed else None) + "\n")

    def record(self, record: object) -> None:
        """Write one line of NDJSON, in both forms of output."""
        self._write(json_text(record) + "\n")

    def line(self, text: str = "") -> None:
        """Write one line of text."""
        self._text(printable(text))

    def lines(self, text: str) -> None:
        """Write a text of several lines; later ones are indented to distinguish them from the command's own."""
        self._text(_printable_lines(text, "    "))

    def table(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[object]],
        *,
        title: str | None = None,
        right: Collection[str] = (),
        is_listed: bool = False,
    ) -> None:
        """Write a table; columns in `right` are aligned to the right.

        On a terminal the table has its width, and cells may have several lines; elsewhere, and in a table of more than
        1,000 rows, each row is one line.
        `is_listed`: if the table is wider than the terminal, or than 120 columns elsewhere, write a list of the rows.
        """
        if self.as_json:
            return
        # imported on use, because loading is slow
        from rich.cells import cell_len
        from rich.console import Console

        rows = list(rows)
        cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
        widths = [max(map(cell_len, column)) for column in zip(columns, *cells, strict=True)]
        # a cell has a blank on each side, and a line on the left of the first one and on the right of each
        natural = sum(widths) + 3 * len(widths) - 1
        most = shutil.get_terminal_size().columns if self._terminal else _WIDE
        if is_listed and natural > (most if self._terminal else _READABLE):
            self._list(columns, rows, title)
            return
        # Rich needs about half a millisecond for a row, so it draws the head, and rows only where they are folded
        is_folded = natural > most and len(cells) <= _MOST_FOLDED
        # draw for stdout's encoding and colours, but write through `_write`
        encoding = getattr(sys.stdout, "encoding", None)
        drawn = io.TextIOWrapper(io.BytesIO(), encoding, "backslashreplace", newline="")
        unset: list[int | None] = [None] * len(widths)
        width = most if is_folded else max(most, natural)
        console = Console(file=drawn, force_terminal=self._terminal or None, width=width, highlight=False)
        console.print(_table(columns, cells if is_folded else (), title, right, unset if is_folded else widths))
        drawn.seek(0)
        *head, foot = drawn.read().splitlines(keepends=True)
        self._write("".join(head))
        if not is_folded:
            line = "|" if foot.startswith("+") else " "
            aligned = list(zip(widths, [name in right for name in columns], strict=True))
            for row in cells:
                padded = []
                for cell, (wide, is_right) in zip(row, aligned, strict=True):
                    blank = " " * (wide - cell_len(cell))
                    padded.append(blank + cell if is_right else cell + blank)
                self._write(f"{line}{f' {line} '.join(padded)}{line}\n")
        self._write(foot)

    def _list(self, columns: Sequence[str], rows: Sequence[Sequence[object]], title: str | None) -> None:
        """Write the cells of each row as fields, and a blank line."""
        if title:
            self.line(title)
        width = max(map(len, columns))
        for row in rows:
            for name, cell in zip(columns, row, strict=True):
                if cell is not None:
                    self.line(f"  {name:<{width}}  {cell}")
            self.line()

    def fields(self, fields: Mapping[str, object], *, title: str | None = None) -> None:
        """Write names and values, one per line, integers with separators; values of None are left out."""
        if title:
            self.line(title)
        shown = {name: value for name, value in fields.items() if value is not None}
        width = max(map(len, shown), default=0)
        for name, value in shown.items():
            self.line(f"  {name:<{width}}  {f'{value:,}' if type(value) is int else value}")

    def _text(self, text: str) -> None:
        if not self.as_json:
            self._write(text + "\n")

    def _write(self, text: str) -> None:
        with writing_stdout():
            sys.stdout.write(text)

    def flush(self) -> None:
        """Flush stdout. Raises `DiskFull` if it can't be written, `BrokenPipeError`."""
        with writing_stdout():
            sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write a note to stderr, or to the log with --log-format json; silent with --quiet."""
        if self.quiet:
            return
        if self.logs_json:
            _log(logging.INFO, text)
        else:
            tell(printable(text) + "\n")

    def remark(self, text: str) -> None:
        """Write a note for people that programs find in the document; silent with --quiet."""
        if not self.as_json:
            self.note(text)

    def in_flags(self, text: str) -> str:
        """Return a text of the library with the command's flags in place of its names, and ISO times."""
        text = _TIMES.sub(lambda time: f"{time[1]} {format_time(int(time[2]))}", text)
        for name in sorted(self.flags, key=len, reverse=True):
            text = re.sub(rf"(?<![\w.'\"-]){name}(?!=True|[\w'\"])", self.flags[name], text)
        return text

    def error(self, kind: str, message: str, **details: Any) -> None:
        """Report an error on stderr: one line, or one JSON document."""
        message = self.in_flags(message)
        if self.logs_json:
            _log(logging.ERROR, message, error={"type": kind, **details})
        elif self.as_json:
            tell(json_text({"error": {"type": kind, "message": message, **details}}) + "\n")
        else:
            tell(_printable_lines(f"tiered-index: {message}", "    ") + "\n")

    def error_line(self, text: str) -> None:
        """Add a line for people to an error that was reported."""
        if not (self.as_json or self.logs_json):
            tell(f"  {printable(text)}\n")

    def traceback(self, error: BaseException) -> None:
        """Write an error's traceback to stderr."""
        tell(_printable_lines("".join(traceback.format_exception(error)).removesuffix("\n")) + "\n")


def _table(
    columns: Sequence[str],
    rows: Iterable[Sequence[str]],
    title: str | None,
    right: Collection[str],
    widths: Sequence[int | None],
) -> Table:
    """Return a table whose columns have `widths`; None: the width of its cells."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    heading = Text(printable(title)) if title is not None else None
    table = Table(box=SIMPLE_HEAD, title=heading, title_justify="left", pad_edge=False)
    for name, width in zip(columns, widths, strict=True):
        table.add_column(name, justify="right" if name in right else "left", overflow="fold", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _log(level: int, text: str, **fields: Any) -> None:
    """Add a record to the log, regardless of the log level."""
    _NOTES.handle(_NOTES.makeRecord(_NOTES.name, level, "", 0, text, (), None, extra={"fields": fields}))


def tell(text: str, stream: TextIO | None = None) -> None:
    """Write to `stream` (default: stderr); ignore errors."""
    stream = sys.stderr if stream is None else stream
    try:
        stream.write(text)
        stream.flush()
    except OSError:
        discard(stream)


@contextlib.contextmanager
def writing_stdout() -> Iterator[None]:
    """Raise `DiskFull` if stdout can't be written in the block, and `BrokenPipeError` if the pipe is closed."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        discard(sys.stdout)
        raise DiskFull(f"stdout can't be written: {error.strerror}") from error


def _is_terminal(stream: TextIO) -> bool:
    return stream.isatty()


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: otherwise the interpreter would report an error when it flushes at exit."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
