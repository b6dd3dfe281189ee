"""docs/rocketmq.md shows commands and options that there are."""

import re
from pathlib import Path
from typing import get_args, get_type_hints

import typer.main

from tiered_index import IndexConfig
from tiered_index.cli.main import LateCommand, app
from tiered_index.service.files.unsealed import SHOWN_EVERY_MS
from tiered_index.service.lookup.messages import MessageState

PAGE = (Path(__file__).parents[3] / "docs" / "rocketmq.md").read_text()
COMMANDS = sorted(set(re.findall(r"(?:^|`)tiered-index ([^`\n]+)", PAGE, re.MULTILINE)))


def test_the_page_has_commands() -> None:
    assert {line.split()[0] for line in COMMANDS} == {"ingest", "query", "message", "import-classic", "serve"}
    assert {name for name in ("queryMsgByKey", "queryMsgById", "queryMsgByUniqueKey") if f"`{name} " in PAGE} == {
        "queryMsgByKey",
        "queryMsgById",
        "queryMsgByUniqueKey",
    }


def test_a_shown_command_has_the_shown_options() -> None:
    for line in COMMANDS:
        name, *words = line.split()
        command = typer.main.get_command(app).commands[name].loaded()  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known, line


def test_every_option_named_in_the_text_is_one() -> None:
    group = typer.main.get_command(app)
    commands = [
        command.loaded() if isinstance(command, LateCommand) else command
        for command in group.commands.values()  # type: ignore[attr-defined]
    ]
    known = {
        name
        for command in commands
        for parameter in command.params
        for name in (*parameter.opts, *parameter.secondary_opts)
    }
    named = set(re.findall(r"`(--[a-z-]+)", PAGE))
    assert named
    assert named <= known


def test_every_state_is_explained() -> None:
    for state in MessageState.__args__:  # type: ignore[attr-defined]
        assert f"| `{state}` |" in PAGE


def test_what_rocketmq_makes_of_files_is_said() -> None:
    """Which release reads which hash, how far behind a live file is, and that RocketMQ doesn't refuse other files."""
    section = PAGE.split("## Which RocketMQ reads these files")[1]
    for rule in get_args(get_args(get_type_hints(IndexConfig)["hash"])[0]):
        assert f'`hash = "{rule}"`' in section
    assert f"every {SHOWN_EVERY_MS // 1000} s" in section
    assert "no magic" in section and "preset `native`" in section
