"""Every error has its exit code and message: in a command, in typer's runner and in a process."""

import json
import logging
import os
import pickle
import re
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import tiered_index.errors as errors
from tiered_index.cli.declaring import command
from tiered_index.cli.main import LateCommand, app, run
from tiered_index.cli.session import Session

RAISED = {
    errors.InvalidArgument("bad"): 2,
    errors.InvalidCursor("bad"): 2,
    errors.OwnedBySource("bad"): 2,
    errors.ConfigError("bad"): 2,
    errors.NotAnIndex("bad"): 2,
    errors.SchemaMismatch("bad"): 2,
    errors.StorageUnavailable("bad"): 3,
    errors.StorageMisconfigured("bad"): 3,
    errors.FolderDenied("bad"): 3,
    errors.ObjectNotFound("bad"): 3,
    errors.CorruptFile("bad", "worse"): 4,
    errors.UnsupportedVersion("bad", "worse"): 4,
    errors.LockHeld("bad", pid=1, host="h"): 5,
    errors.WriterFenced("bad"): 5,
    errors.PartialAnswer("bad"): 6,
    errors.BudgetExceeded("bad"): 6,
    errors.BackPressure("bad"): 7,
    errors.DiskFull("bad"): 7,
    errors.IndexClosed("bad"): 70,
    errors.CloseTimeout("bad"): 3,
    errors.NestedCall("bad"): 70,
    RuntimeError("bad"): 70,
    KeyboardInterrupt(): 130,
}


def invoke(act, *arguments):
    """Run a command that calls `act` with a session. Return the result."""

    @command
    def probe(session: Session) -> int:
        """Call the function of the test."""
        return act(session)

    application = typer.Typer()
    application.command()(probe)
    return CliRunner().invoke(application, list(arguments))


@pytest.mark.parametrize(("error", "code"), RAISED.items(), ids=lambda value: type(value).__name__)
def test_the_code_of_every_error_and_its_copy_of_another_process(error, code):
    def act(session):
        raise error

    plain, as_json = invoke(act), invoke(act, "--json")
    assert (plain.exit_code, as_json.exit_code) == (code, code)
    assert (plain.stdout, as_json.stdout) == ("", "")
    assert "Traceback" not in plain.stderr
    if code != 130:
        assert "bad" in plain.stderr
        document = json.loads(as_json.stderr.splitlines()[0])["error"]
        assert (document["type"], document["exit_code"]) == (type(error).__name__, code)
    if code == 70:
        assert "Traceback" in invoke(act, "--debug").stderr
    error.more = [1]
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        copy = pickle.loads(pickle.dumps(error, protocol))
        assert (type(copy), str(copy), copy.args, vars(copy)) == (type(error), str(error), error.args, vars(error))


def test_retries_are_logged_once_a_second_unless_quiet():
    def act(session):
        for number in range(3):
            logging.getLogger("tiered_index.storage.retry").info("attempt %d", number)
        return 0

    assert invoke(act).stderr == "INFO tiered_index.storage.retry: attempt 0\n"
    assert invoke(act, "--quiet").stderr == ""
    assert len(invoke(act, "--verbose").stderr.splitlines()) == 3


def all_commands(group=None, words=()):
    """Yield the words and the object of every command and group."""
    group = group or typer.main.get_command(app)
    group = group.loaded() if isinstance(group, LateCommand) else group
    yield words, group
    for name, below in getattr(group, "commands", {}).items():
        yield from all_commands(below, (*words, name))


@pytest.mark.parametrize(
    ("words", "shown"), list(all_commands()), ids=lambda value: " ".join(value) if isinstance(value, tuple) else ""
)
def test_help_fits_80_columns_and_begins_with_examples(words, shown, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    lines = CliRunner().invoke(app, [*words, "--help"]).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for option in (name for parameter in shown.params for name in (*parameter.opts, *parameter.secondary_opts)):
        assert not option.startswith("--") or any(option in line.split() for line in lines), option
    if not hasattr(shown, "commands"):
        _, marker, *paragraphs = shown.help.strip().split("\n\n")
        is_example = [paragraph.startswith("  ") for paragraph in paragraphs]
        assert marker == "[bold]Examples[/bold]" and is_example[0] and is_example == sorted(is_example, reverse=True)
        assert f"tiered-index {' '.join(words)}" in paragraphs[0]


def test_there_are_at_most_twenty_commands_in_five_groups():
    commands = typer.main.get_command(app).commands
    assert len([words for words, shown in all_commands() if not hasattr(shown, "commands")]) <= 20
    groups = dict.fromkeys(command.rich_help_panel for command in commands.values())
    named = [re.fullmatch(r"(.+): tiered-index ([a-z]+) .+", group) for group in groups]
    assert [match[1] for match in named] == ["Write", "Look up", "Keep", "Operate", "Spark"]
    assert all(commands[match[2]].rich_help_panel == match[0] for match in named)
    # the list of commands is written without loading them
    late = {name: command for name, command in commands.items() if isinstance(command, LateCommand)}
    assert all(command.help == command.loaded().help.partition("\n\n")[0] for command in late.values())


def test_a_shell_completes_commands_and_options(monkeypatch):
    monkeypatch.setenv("_TIERED_INDEX_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "tiered-index query --max")
    monkeypatch.setenv("COMP_CWORD", "2")
    completed = CliRunner().invoke(app, [], prog_name="tiered-index")
    assert completed.stdout.split() == ["--max", "--max-requests", "--max-bytes"]
    monkeypatch.delenv("_TIERED_INDEX_COMPLETE")
    assert "--install-completion" in CliRunner().invoke(app, ["--help"]).stdout


FLOOD = """
from tiered_index.cli.declaring import command
from tiered_index.cli.session import Session
import typer
@command
def flood(session: Session) -> int:
    for number in range(100000):
        session.out.record({'number': number})
    return 0
app = typer.Typer()
app.command()(flood)
app(standalone_mode=True)
"""


def test_a_closed_pipe_is_not_an_error(monkeypatch):
    process = subprocess.Popen([sys.executable, "-c", FLOOD], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout.readline() == b'{"number": 0}\n'
    process.stdout.close()
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait(30) == 141
    end, start = os.pipe()
    os.close(end)
    with open(start, "w") as stdout:
        monkeypatch.setattr(sys, "stdout", stdout)
        with pytest.raises(SystemExit) as ended:
            run(["query", "--help"])
    assert ended.value.code == 141
