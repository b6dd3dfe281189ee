"""Pages, help, docstrings, comments and messages are in plain English.

Sentences have at most 25 words, and no phrases that puzzle readers. proselint finds clichés and jargon.
"""

import pytest

from tests.support.prose import TOP, faults, faults_of_module, linted, pages, texts_of_module
from tests.unit.cli.test_exit_codes import all_commands

CODE = ("tiered_index", "tests", "docs")


@pytest.mark.parametrize(
    "text",
    [
        "What deletes, a dry run unless --yes",
        "Shown are objects, entries, bytes and dollars a month; nothing is changed without --yes.",
        "Who gives a position blocks others",
        "is lost to lookups",
        "the record's answer was lost",
        "who wants columns has `to_arrow()` alone",
        "A line of two values, of which one is wrong",
        "slots; default: the index's, of a new index mask",
        "what finds none waits",
        "Authority of clients' certificates",
        "what the storage lost an object of",
        "has not the {n} keys that it says",
        "a record that no reader takes",
        "none of an index's service",
        "Two helpers of one line with one caller less",
        "A lookup makes no object a key or run",
        "It is kept for ever.",
        f"A sentence of {26 * 'x '}words",
    ],
)
def test_finds_hard_sentences(text: str) -> None:
    assert faults(text)


@pytest.mark.parametrize(
    "text",
    [
        "Commands that delete. They only print what they would do unless you pass `--yes`.",
        "Prints the objects, entries, bytes and monthly cost that would go. Pass `--yes` to apply.",
        "Advancing a source's position blocks other writers of that source.",
        "the response to the append was lost",
        "key count {found} differs from the header's {n}",
        "What happens if two writers start?",
        "How to keep a year",
    ],
)
def test_passes_plain_sentences(text: str) -> None:
    assert not faults(text)


def test_pages() -> None:
    for page in pages():
        assert not faults(page.read_text()), page
        assert not linted(page.read_text()), page


def test_help() -> None:
    for words, command in all_commands():
        texts = [command.help or "", *(getattr(one, "help", None) or "" for one in command.params)]
        assert not [found for text in texts for found in faults(text.partition("[bold]")[0])], words
        assert not linted("\n\n".join(texts)), words


def test_docstrings_comments_and_messages() -> None:
    modules = [path for folder in CODE for path in (TOP / folder).rglob("*.py")]
    assert not {f"{path}": found for path in (*modules, TOP / "setup.py") if (found := faults_of_module(path))}


def test_proselint_passes_docstrings_and_messages() -> None:
    for path in (TOP / "tiered_index").rglob("*.py"):
        assert not linted("\n\n".join(texts_of_module(path.read_text()))), path
