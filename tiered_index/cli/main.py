"""`tiered-index`: the application, and `run`, which every process of it starts in. Commands are loaded when they run.

Errors of commands become exit codes in `session.command`; here are only those of the command line itself.
"""

from __future__ import annotations

import gc
import io
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer import Option
from typer.core import TyperCommand

from tiered_index._version import __version__
from tiered_index.cli.output import CLOSED_PIPE, Output, discard, printable, tell
from tiered_index.errors import DiskFull

USAGE = 2
INTERRUPTED = 130
# typer keeps the class private, and its module differs between versions.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_EPILOG = (
    "Settings: --set NAME=VALUE wins over the environment (TIERED_INDEX_ROOT, TIERED_INDEX_STORAGE, ...), which wins "
    "over --config FILE (TOML)."
)
_APPLICATION: Any = {
    "no_args_is_help": True,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

# Each command's function and how its help begins: the list of commands is shown without loading them.
_COMMANDS = {
    "ingest:ingest": (
        "Index the messages of a RocketMQ store or a file; the same source again continues where it stopped."
    ),
    "ingest:import_classic": "Lift RocketMQ's classic index files into a tiered index.",
    "query:query": "Look a key up: where its messages lie, newest first, or the messages themselves.",
    "messages:message": (
        "Show one message: by the id that names its place (store host and commit log offset, 32 or 56 hexadecimal "
        "digits), or with --topic by the unique key that its producer gave it, which needs the index, or by its "
        "offset in a queue of --store. Of messages with one unique key 32 are shown at a time."
    ),
    "files:topics": "List the topics: entries, bytes of their messages, first and last second.",
    "files:files": (
        "List every file and window table: state, lane, interval, entries, bytes and where it lies; then what is "
        "archived."
    ),
    "files:inspect": (
        "Show header, geometry, metadata and directory statistics of one file; its entries are not checked (that is "
        "verify)."
    ),
    "files:dump": (
        'Print every entry of one file, one JSON object a line, in the file\'s order; the last line is {"status": ...}.'
    ),
    "files:du": ("Show what is stored and what it costs: entries, bytes and dollars a month by topic, day and state."),
    "export:export": ("Export the entries of an index as one table: a row an entry, as of one position of the log."),
    "importing:import_": ("Make an index of what `export` wrote, or add it to one."),
    "verify:verify": (
        "Check every checksum: local files, log records and checkpoints, the log against the objects, local copies "
        "against remote ones."
    ),
    "recovery.recover:recover": (
        "Recover a root after a crash: drop half-made work, move files to the state they reached, rebuild hash chains."
    ),
    "recovery.rebuild:rebuild": (
        "Make an index anew of the archived segments of another one, whose files may all be gone."
    ),
    "merge:merge": (
        "Merge uploaded files, and tables of shorter windows, into window tables, so that a lookup costs a request a "
        "window."
    ),
    "copying:copy": (
        "Copy an index to another storage, as of one position of its log: for a backup, another bucket, region or "
        "backend."
    ),
    "removing.expire:expire": (
        "Let expire what is older than the rule says: the options' where one is given, else the setting retention."
    ),
    "removing.erase:erase": ("Erase what a topic has before a moment: of keys, of a queue, or all of it."),
    "removing.orphans:orphans": (
        "Find objects that the log does not name: what crashes left, and what merges have replaced."
    ),
    "serve:serve": "Serve lookups over HTTP until ended.",
    "tokens:token": "Make a token for the service and print it, once: the file has its hash only.",
}
_ON_SPARK = {
    "spark.writing:build": (
        "Build window tables from files or a commit log, on Spark, and publish them with one log record."
    ),
    "spark.writing:merge": (
        "Merge uploaded files, and tables of shorter windows, into window tables: `tiered-index merge` by any number "
        "of executors."
    ),
    "spark.writing:compact": (
        'Compact the files that writers with setting compaction = "spark" have staged, and publish them with one log '
        "record."
    ),
    "spark.writing:erase": (
        "Erase what a topic has before a moment, and rewrite what holds any of it: `tiered-index erase --now` by any "
        "number of executors."
    ),
    "spark.reading:lookup": (
        "Look up every key of a file, on Spark: each stored object that may hold one is opened once, whatever the "
        "number of keys."
    ),
    "spark.reading:audit": (
        "Check every record and every byte of an index, and that it holds its source's entries: none missing, extra "
        "or wrong. Changes nothing."
    ),
}


class LateCommand(TyperCommand):
    """A command that is loaded when it runs, shows its help or is completed; its callback returns the function."""

    def loaded(self) -> Any:
        """Return the command itself."""
        assert self.callback is not None
        try:
            function = self.callback()
        except KeyboardInterrupt:
            tell("interrupted\n")
            raise
        except OSError as error:  # which `run` would take for one of stdout
            raise ImportError(f"{self.name} can't be loaded: {error}") from error
        if not gc.isenabled():
            # `__main__` turned it off: from here on there is garbage, and none in what was loaded
            gc.freeze()
            gc.enable()
        alone = typer.Typer(add_completion=False, rich_markup_mode="rich")
        alone.command(self.name)(function)
        return typer.main.get_command(alone)

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Return the context of the command itself, which runs in it."""
        return self.loaded().make_context(*args, **kwargs)


def _add(program: typer.Typer, commands: dict[str, str]) -> None:
    for place, help_begins in commands.items():
        name = place.partition(":")[2].rstrip("_").replace("_", "-")
        program.command(name, cls=LateCommand, help=help_begins)(_loader(place))


def _loader(place: str) -> Callable[[], Any]:
    return lambda: pkgutil.resolve_name(f"tiered_index.cli.{place}")


app = typer.Typer(
    name="tiered-index",
    help="A tiered index for message logs: any message by key and time, hot from local files, cold straight from an "
    "object store.",
    epilog=_EPILOG,
    pretty_exceptions_enable=False,
    **_APPLICATION,
)
_add(app, _COMMANDS)

spark = typer.Typer(
    name="spark", help="Build, merge, erase, look up and audit on Spark, where one machine ends.", **_APPLICATION
)
_add(spark, _ON_SPARK)
app.add_typer(spark)


def _print_version(wanted: bool) -> None:
    if wanted:
        Output(as_json=False).line(f"tiered-index {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: bool = Option(
        False, "--version", help="Print the version and exit.", callback=_print_version, is_eager=True
    ),
) -> None:
    pass


def run(arguments: list[str] | None = None, program: typer.Typer = app, name: str = "tiered-index") -> None:
    """Run one command line (the process's own by default) of a program and exit with its code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        code = program(args=given, prog_name=name, standalone_mode=False)
    except _USAGE_ERROR as error:
        # loaded when a value is wrong: --help and --version do without
        from pydantic import ValidationError

        if isinstance(error.__context__, ValidationError):
            from tiered_index.config import in_our_words

            error.message = "; ".join(map(in_our_words, error.__context__.errors()))
        if "--json" in given:
            Output(as_json=True).error(error.__class__.__name__, error.format_message(), exit_code=USAGE)
        else:
            error.message = printable(error.message)
            text = io.StringIO()
            error.show(file=text)
            tell(text.getvalue())
        code = USAGE
    except typer.Abort:
        code = INTERRUPTED
    except SystemExit as ended:  # by which the library of the command line says that nobody reads on
        code = CLOSED_PIPE if isinstance(ended.__context__, BrokenPipeError) else ended.code
    except (OSError, DiskFull) as error:  # of help, usage and version: commands report theirs themselves
        discard(sys.stdout)
        message = f"stdout can't be written: {error.strerror}" if isinstance(error, OSError) else str(error)
        Output(as_json="--json" in given).error("DiskFull", message, exit_code=DiskFull.exit_code)
        code = DiskFull.exit_code
    sys.exit(code if isinstance(code, int) else 0)
