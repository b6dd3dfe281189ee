"""`tiered-index`: the application, and `run`, which every process of it starts in.

Errors of commands become exit codes in `session.command`; here are only those of the command line itself.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import typer
from pydantic import ValidationError
from typer import Option

from tiered_index._version import __version__
from tiered_index.cli.bench.command import bench
from tiered_index.cli.demo.command import demo
from tiered_index.cli.files import dump, files, inspect, topics
from tiered_index.cli.ingest import import_classic, ingest
from tiered_index.cli.maintenance import orphans, recover, verify
from tiered_index.cli.merge import merge
from tiered_index.cli.output import Output, discard, printable, tell
from tiered_index.cli.query import message, query
from tiered_index.cli.spark.audit import audit
from tiered_index.cli.spark.build import build, compact
from tiered_index.cli.spark.build import merge as merge_on_spark
from tiered_index.cli.spark.lookup import lookup
from tiered_index.config import in_our_words
from tiered_index.errors import DiskFull

USAGE = 2
INTERRUPTED = 130
# typer keeps the class private, and its module differs between versions.
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_EPILOG = (
    "Settings: flags win over the environment (TIERED_INDEX_ROOT, TIERED_INDEX_STORAGE, ...), which wins over "
    "--config FILE (TOML)."
)
_APPLICATION: Any = {
    "no_args_is_help": True,
    "rich_markup_mode": "rich",
    "context_settings": {"help_option_names": ["-h", "--help"]},
}

app = typer.Typer(
    name="tiered-index",
    help="A tiered index for message logs: any message by key and time, hot from local files, cold straight from an "
    "object store.",
    epilog=_EPILOG,
    pretty_exceptions_enable=False,
    **_APPLICATION,
)
_READING = (query, message, topics, files, inspect, dump, verify)
_COMMANDS = (demo, ingest, import_classic, *_READING, recover, merge, orphans, bench)
for _command in _COMMANDS:
    app.command(_command.__name__.replace("_", "-"))(_command)

spark = typer.Typer(
    name="spark", help="Build, merge, look up and audit on Spark, where one machine ends.", **_APPLICATION
)
for _command in (build, merge_on_spark, compact, lookup, audit):
    spark.command(_command.__name__)(_command)
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
        if isinstance(error.__context__, ValidationError):
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
    except (OSError, DiskFull) as error:  # of help, usage and version: commands report theirs themselves
        discard(sys.stdout)
        message = f"stdout can't be written: {error.strerror}" if isinstance(error, OSError) else str(error)
        Output(as_json="--json" in given).error("DiskFull", message, exit_code=DiskFull.exit_code)
        code = DiskFull.exit_code
    sys.exit(code if isinstance(code, int) else 0)
