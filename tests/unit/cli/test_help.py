"""The commands: few, in five groups, each with an example first."""

from __future__ import annotations

import re

import typer

from docs.generators.reference import all_commands
from tiered_index.cli.main import LateCommand, app


def test_there_are_at_most_twenty_commands_in_five_groups_with_an_example_each() -> None:
    program = typer.main.get_command(app)
    commands = program.commands  # type: ignore[attr-defined]
    assert len(commands) <= 20
    groups = dict.fromkeys(command.rich_help_panel for command in commands.values())
    named = [re.fullmatch(r"(.+): tiered-index ([a-z]+) .+", str(group)) for group in groups]
    assert [match and match[1] for match in named] == ["Write", "Look up", "Keep", "Operate", "Spark"]
    examples = {match[2]: match[0] for match in named if match is not None}
    assert all(commands[name].rich_help_panel == group for name, group in examples.items())


def test_the_help_of_each_command_begins_with_examples() -> None:
    for words, command in all_commands():
        head, marker, *paragraphs = (command.help or "").strip().split("\n\n")
        assert head and marker == "[bold]Examples[/bold]", words
        is_example = [paragraph.startswith("  ") for paragraph in paragraphs]
        assert is_example == sorted(is_example, reverse=True) and is_example[0], words
        assert f"tiered-index {' '.join(words)}" in paragraphs[0], words


def test_the_list_of_commands_has_the_first_line_of_each_help() -> None:
    listed = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in listed.items():
        if isinstance(command, LateCommand):
            assert command.loaded().help.partition("\n\n")[0] == command.help, name
