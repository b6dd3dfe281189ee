"""Pages, help and messages are in plain English: sentences of at most 25 words, without phrases that puzzle readers.
proselint finds clichés, redundant words and jargon.
"""

import ast
import functools
import re
import tokenize
from io import StringIO
from pathlib import Path

import pytest

from tests.support.prose import TOP, faults, linted, pages
from tests.unit.cli.test_exit_codes import all_commands

AVOID = re.compile(
    r"\b(for ever|for good|of which|who wants|it is said|is told|are told|takes in|is met|anew|goes on|lies|stands|"
    r"whoever|but for|is no [A-Z]\w+)\b"
)
AVOID_IN_CODE = re.compile(r"\b(for ever|for good|takes in|is met|anew|goes on|lies|stands|but for)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


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


@functools.cache
def nodes_of_modules() -> list[tuple[Path, str, list[ast.AST]]]:
    """Return path, text and all nodes of each module."""
    texts = [(path, path.read_text()) for path in (TOP / "tiered_index").rglob("*.py")]
    return [(path, text, list(ast.walk(ast.parse(text)))) for path, text in texts]


def test_code() -> None:
    for path, text, every in nodes_of_modules():
        nodes = [node for node in every if isinstance(node, DOCUMENTED)]
        docs = [(node, ast.get_docstring(node) or "") for node in nodes]
        tokens = tokenize.generate_tokens(StringIO(text).readline)
        comments = [one.string for one in tokens if one.type == tokenize.COMMENT]
        assert not [one for one in (*comments, *(doc for _, doc in docs)) if AVOID_IN_CODE.search(one)], path
        firsts = [doc for node, doc in docs if isinstance(node, ast.ClassDef | ast.Module)]
        assert not [doc for doc in firsts if re.match(r"(What|Who|Whoever|Where|How)\b", doc)], path


def test_messages() -> None:
    for path, _, every in nodes_of_modules():
        raised = [node for node in every if isinstance(node, ast.Raise)]
        texts = [one.value for node in raised for one in ast.walk(node) if isinstance(one, ast.Constant)]
        assert not [text for text in texts if isinstance(text, str) and AVOID.search(text)], path
