"""Pages, help and messages are in plain English: sentences of at most 25 words, without phrases that puzzle readers.
proselint finds clichés, redundant words and jargon.
"""

import ast
import functools
import re
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from proselint.checks import __register__ as checks
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

from tests.unit.cli.test_exit_codes import all_commands

TOP = Path(__file__).parents[2]
PAGES = [
    *TOP.glob("*.md"),
    *(TOP / "docs").rglob("*.md"),
    *(TOP / "deploy").glob("*.md"),
    *TOP.glob("tiered_index/**/SPEC.md"),
]
MOST_WORDS = 25
# a specification has formulas and lists in sentences
MOST_OF_SPEC = 42
AVOID = re.compile(
    r"\b(for ever|for good|of which|who wants|it is said|is told|are told|takes in|is met|anew|goes on|lies|stands|"
    r"whoever|but for|is no [A-Z]\w+)\b"
)
AVOID_IN_CODE = re.compile(r"\b(for ever|for good|takes in|is met|anew|goes on|lies|stands|but for)\b")
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
MARKUP = (
    (r"<!--.*?-->|^```.*?^```", "\n\n", re.M | re.S),
    (r"`[^`]*`", "X", 0),
    (r"!?\[([^\]]*)\]\([^)]*\)", r"\1", 0),
    (r"\n(?=\s*(?:[-*|#]|\d+\.) )", "\n\n", 0),
)

CheckRegistry().register_many(checks)
# pages have tables and ranges of numbers, and "point in time" is a term of recovery
NOT_ASKED = ("dates_times", "lexical_illusions", "typography")
NOT_ASKED += ("industrial_language.chatspeak", "redundancy.misc.after_the")


def sentences(text: str) -> Iterator[str]:
    for pattern, plain, flags in MARKUP:
        text = re.sub(pattern, plain, text, flags=flags)
    for part in re.split(r"\n\s*\n|\|", text):
        yield from re.split(r"(?<=[.!?:;])\**\s+", " ".join(part.split()))


def faults(text: str, most: int = MOST_WORDS) -> list[str]:
    return [one for one in sentences(text) if len(one.split()) > most or AVOID.search(one)]


def linted(text: str) -> list[str]:
    """Return what proselint finds in the sentences of a text."""
    results = [one.check_result for one in LintFile("text", "\n".join(sentences(text))).lint()]
    return [f"{one.check_path}: {one.message}" for one in results if not one.check_path.startswith(NOT_ASKED)]


def test_pages() -> None:
    for page in PAGES:
        most = MOST_OF_SPEC if page.name == "SPEC.md" else MOST_WORDS
        assert not faults(page.read_text(), most), page
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
