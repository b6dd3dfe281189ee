"""`tiered-index`: the application, and `run`, the start of its processes. Commands are loaded when they run.

Errors of commands become exit codes in `session.command`; this module handles only those of the command line itself.
"""

from __future__ import annotations

import io
import pkgutil
import sys
from collections.abc import Callable
from typing import Any

import typer
from typer import Option
from typer.core import TyperCommand

from tiered_index.base.version import __version__
from tiered_index.cli.exit_codes import CLOSED_PIPE, DONE, INTERRUPTED, NOT_LOADED, USAGE
from tiered_index.cli.loading import loaded
from tiered_index.cli.output import Output, discard, printable, tell
from tiered_index.errors import DiskFull

# typer's class is private, and its module differs between versions
_USAGE_ERROR: Any = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

_EPILOG = (
    "Precedence of settings: --set NAME=VALUE, then the environment (TIERED_INDEX_ROOT, TIERED_INDEX_STORAGE, ...), "
    "then --config FILE (TOML)."
)
_APPLICATION: Any = {
    "no_args_is_help": True,
    "rich_markup_mode": "rich",
    "context_settings": {
        "help_option_names": ["-h", "--help"],
        # typer loads pydantic, which takes as long as all of a help, for a flag that is None and not False
        "default_map": dict.fromkeys(("help", "install_completion", "show_completion"), False),
    },
}

# Each group of commands, with an example; and each command's function and the first line of its help: the list of
# commands is printed without loading them
_GROUPS = {
    "Write: tiered-index ingest STORE --root DIR --storage URI": {
        "write:ingest": "Index messages of a RocketMQ store, Kafka or a file. Run it again to continue where it "
        "stopped.",
        "write:export": "Export the entries of an index as one consistent snapshot.",
    },
    "Look up: tiered-index query TOPIC KEY --storage URI": {
        "look_up:query": "Look up a key: print its entries, the newest first, or its messages.",
        "look_up:message": "Show one message by its id, unique key or queue offset, or one record of Kafka.",
        "look_up:topics": "List the topics, each with its entries, bytes of entries and time range.",
        "look_up:files": "List all files and window tables, then the archived segments, or show one file.",
    },
    "Keep: tiered-index copy --from URI --to URI": {
        "keep:merge": "Merge uploaded files into window tables, so that a lookup costs one request per window.",
        "keep:copy": "Copy an index to another storage, for a backup, a move or a standby.",
        "keep:expire": "Expire entries by age, topic or size.",
        "keep:erase": "Erase the entries of a topic before a time: all, or those of some keys or of a queue.",
        "keep:orphans": "Find objects that the log does not name.",
    },
    "Operate: tiered-index verify --storage URI": {
        "operate:doctor": "Check that a storage and a disk have the abilities that the engine needs.",
        "operate:verify": "Check all checksums of an index: local files, log records, checkpoints and objects.",
        "operate:recover": "Recover a root after a crash, a restore or a loss.",
        "operate:serve": "Serve lookups over HTTP until SIGTERM or SIGINT.",
        "operate:token": "Create a token for the service and print it, once.",
    },
}
_SPARK_GROUP = "Spark: tiered-index spark build --source FOLDER --storage URI"
_ON_SPARK = {
    "spark:build": "Build window tables from files or a commit log with Spark.",
    "spark:erase": "Erase entries of a topic, as `tiered-index erase --now`, with Spark.",
    "spark:lookup": "Look up every key of a file with Spark.",
    "spark:audit": "Check every byte of an index, and compare its entries with its source. Changes nothing.",
}


class LateCommand(TyperCommand):
    """A command whose declaration is loaded when it runs, shows its help or is completed. Its callback returns it."""

    def loaded(self, *, with_others: bool = False) -> Any:
        """Return the command itself, if it has any also with the options of connectors of other packages."""
        assert self.callback is not None
        function = loaded(self.name, self.callback)
        if with_others:
            function = loaded(self.name, function.with_others)
        return typer.main.get_command(alone(function, self.name))

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **named: Any) -> Any:
        """Return the context of the command itself, which runs in it."""
        assert self.callback is not None
        needs_others = getattr(loaded(self.name, self.callback), "needs_others", None)
        command = self.loaded(with_others=needs_others is not None and needs_others(args))
        return command.make_context(info_name, args, *more, **named)


def alone(function: Callable[..., Any], name: str | None = None) -> typer.Typer:
    """Return a program of one command."""
    program = typer.Typer(add_completion=False, pretty_exceptions_enable=False, **_APPLICATION)
    program.command(name)(function)
    return program


def _add(program: typer.Typer, commands: dict[str, str], group: str | None = None) -> None:
    for place, help_begins in commands.items():
        name = place.partition(":")[2]
        program.command(name, cls=LateCommand, help=help_begins, rich_help_panel=group)(_loader(place))


def _loader(place: str) -> Callable[[], Any]:
    return lambda: pkgutil.resolve_name("tiered_index.cli.{}.commands:{}".format(*place.split(":")))


app = typer.Typer(
    name="tiered-index",
    help="Find the messages with a key in a time range: recent ones in local files, older ones in an object store.",
    epilog=_EPILOG,
    pretty_exceptions_enable=False,
    **_APPLICATION,
)
for _group, _commands in _GROUPS.items():
    _add(app, _commands, _group)

spark = typer.Typer(name="spark", help="Build, erase, look up and audit with Spark, on many machines.", **_APPLICATION)
_add(spark, _ON_SPARK)
app.add_typer(spark, rich_help_panel=_SPARK_GROUP)


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


_WORDS = {
    "int_": "must be a whole number",
    "float_": "must be a number",
    "greater_than_equal": "must be at least {ge:.15g}",
    "less_than_equal": "must be at most {le:.15g}",
}

_ONE_KEY = (
    ". A query has one KEY: quote a key with blanks, and write several into a file with the columns topic and key, for "
    "--keys FILE"
)


def _in_our_words(error: Any) -> str:
    if error["type"] == "value_error":
        return str(error["ctx"]["error"]).removesuffix(".")
    sentence = next((words for kind, words in _WORDS.items() if error["type"].startswith(kind)), None)
    return sentence.format_map(error.get("ctx", {})) if sentence is not None else str(error["msg"])


def run(arguments: list[str] | None = None, program: typer.Typer = app, name: str = "tiered-index") -> None:
    """Run one command line (the process's own by default) of a program and exit with its code."""
    words = sys.argv[1:] if arguments is None else arguments
    try:
        code = program(args=words, prog_name=name, standalone_mode=False)
    except _USAGE_ERROR as error:
        # typer's own checks have technical messages
        if (errors := getattr(error.__context__, "errors", None)) is not None:
            error.message = "; ".join(map(_in_our_words, errors()))
        if words[:1] == ["query"] and "extra argument" in error.message:
            error.message += _ONE_KEY
        if "--json" in words:
            Output(as_json=True).error(error.__class__.__name__, error.format_message(), exit_code=USAGE)
        else:
            error.message = printable(error.message)
            text = io.StringIO()
            error.show(file=text)
            tell(text.getvalue())
        code = USAGE
    except typer.Abort:
        code = INTERRUPTED
    except SystemExit as ended:  # typer's response to a closed pipe
        code = CLOSED_PIPE if isinstance(ended.__context__, BrokenPipeError) else ended.code
    except (ImportError, MemoryError) as error:
        # a command that can't be loaded: under a limit of memory, or with a damaged installation
        if "--debug" in words:
            raise
        advice = "check the limit of memory (`ulimit -v`) and the installation (--debug shows where)"
        message = f"{error or 'memory is lacking'}: {advice}"
        Output(as_json="--json" in words).error("SetupUnavailable", message, exit_code=NOT_LOADED)
        code = NOT_LOADED
    except (OSError, DiskFull) as error:  # from help, usage and version: commands report their own errors
        discard(sys.stdout)
        message = f"stdout can't be written: {error.strerror}" if isinstance(error, OSError) else str(error)
        Output(as_json="--json" in words).error("DiskFull", message, exit_code=DiskFull.exit_code)
        code = DiskFull.exit_code
    sys.exit(code if isinstance(code, int) else DONE)
