"""The reference pages equal the output of their generators."""

import pytest

from docs.generators.cli_page import all_commands
from docs.generators.diagrams import PICTURES
from docs.generators.reference import DOCS, PARTS, rewritten


@pytest.mark.parametrize("page", PARTS)
def test_a_generated_page_is_fresh(page: str) -> None:
    assert (DOCS / page).read_text() == rewritten(page), "run `python -m docs.generators.reference`"


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_fresh(name: str) -> None:
    assert (DOCS / "images" / name).read_text() == PICTURES[name](), "run `python -m docs.generators.reference`"


def test_the_page_of_commands_has_each_option_of_each_command() -> None:
    text = (DOCS / "cli.md").read_text()
    for words, command in all_commands():
        section = text.partition(f"\n## {' '.join(words)}\n")[2].partition("\n## ")[0]
        assert command.params and section
        for option in command.params:
            assert option.opts[0] == "--help" or any(f"`{name}" in section for name in (*option.opts, option.metavar))
