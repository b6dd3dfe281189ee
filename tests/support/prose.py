"""Finds sentences that are hard to read: long ones, words of a private dialect, and the findings of proselint.

- `python -m tests.support.prose FOLDER|FILE ...` prints the faults of docstrings, comments, messages and pages.
- `python -m tests.support.prose --warnings` prints the pages with most sentences in the passive voice.
- `python -m tests.support.prose --passive PAGE ...` prints these sentences.
"""

from __future__ import annotations

import ast
import collections
import logging
import re
import sys
import tokenize
from collections.abc import Iterator
from io import StringIO
from pathlib import Path

from proselint.checks import __register__ as checks
from proselint.registry import CheckRegistry
from proselint.tools import LintFile

TOP = Path(__file__).parents[2]
MOST_WORDS = 25
_BEGIN = r"(?:^|(?<=[.!?:;] ))"
_AVOID = {
    r"\bfor (?:ever|good|all time)\b": "permanently",
    r"\banew\b": "again",
    r"\bof (?:which|whom)\b": "a sentence of its own",
    r"\bwhoever\b|\bwho wants\b": "name the person",
    r"\bit is said\b": "name the speaker",
    r"\b(?:is|are|was|were|be|been) told\b": "active voice",
    r"\b(?:takes?|taken|taking|took) in\b": "reads",
    r"\b(?:is|are|was|were) met\b": "finds",
    r"\bgoes\b|\bgo on\b": "a verb that says what happens",
    r"\b(?:lies|stands)\b": "is",
    r"\bbut for\b": "except",
    r"\bis no [A-Z]\w+": "is not a",
    rf"{_BEGIN}(?:What|Who|Whoever|Where|How)\b(?! to\b|[^.!?]*\?)": "a noun",
    r"\bwhat (?:comes|deletes|differs|finds|gives|goes|has|keeps|keys|lets|lookups|makes|needs|tells|waits|writes)\b": (
        "a noun"
    ),
    r"\bwhat (?:the|an?) \w+ (?:lost|has|keeps|gave|wrote|says)\b": "a noun",
    r"\b(?:has|have|had) not (?:the|an?|its|all|any)\b": "does not have",
    rf"{_BEGIN}(?:Asked|Counted|Given|Kept|Left|Meant|Named|Read|Said|Shown|Taken|Tested|Told|Written) (?:is|are)\b": (
        "begin with the subject"
    ),
    r"\bis lost to\b": "hides",
    r"\b(?:answer|reply) (?:was|is) lost\b": "the response was lost",
    r"\bthat no \w+ takes\b": "invalid",
    r"\bnone of (?:an?|the) \w+'s\b": "unexpected",
    r"\b\w+'s?, of (?:an?|the)\b": "a sentence of its own",
    r"\b\w+ (?:less|more) caller\b|\bcaller less\b": "fewer callers",
    r"\bmakes? no \w+ an? \w+ or\b": "per",
    r"^Authority of\b": "CA for",
}
"""Pattern -> the better words."""
_PASSIVE = re.compile(r"\b(?:am|are|be|been|being|is|was|were) (?:\w+ly )?\w+(?:ed|en)\b")
_MARKUP = (
    (r"<!--.*?-->|^```.*?^```", "\n\n", re.M | re.S),
    (r"^ {4}.*$", "\n\n", re.M),
    (r"`+[^`]*`+", "X", 0),
    (r"!?\[([^\]]*)\]\([^)]*\)", r"\1", 0),
    (r"\n(?=\s*(?:[-*|#]|\d+\.) )", "\n\n", 0),
)
CheckRegistry().register_many(checks)
# pages have tables and ranges of numbers, and "point in time" is a term of recovery
_NOT_ASKED = ("dates_times", "lexical_illusions", "typography")
_NOT_ASKED += ("industrial_language.chatspeak", "redundancy.misc.after_the")
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_LOG_METHODS = frozenset(logging.getLevelNamesMapping()) - {"NOTSET"}


def sentences(text: str) -> Iterator[str]:
    """Yield the sentences of a text without its markup."""
    for pattern, plain, flags in _MARKUP:
        text = re.sub(pattern, plain, text, flags=flags)
    for part in re.split(r"\n\s*\n|\|", text):
        yield from re.split(r"(?<=[.!?:;])\**\s+", " ".join(part.split()))


def faults(text: str) -> list[str]:
    """Return each sentence that is too long or has words to avoid, with the reason."""
    faults_found = []
    for sentence in sentences(text):
        if (words := len(sentence.split())) > MOST_WORDS:
            faults_found.append(f"{words} words: {sentence}")
        for pattern, better in _AVOID.items():
            if match := re.search(pattern, sentence):
                faults_found.append(f"{match[0]!r} (better: {better}): {sentence}")
    return faults_found


def linted(text: str) -> list[str]:
    """Return what proselint finds in the sentences of a text."""
    results = [result.check_result for result in LintFile("text", "\n".join(sentences(text))).lint()]
    return [
        f"{result.check_path}: {result.message}" for result in results if not result.check_path.startswith(_NOT_ASKED)
    ]


def texts_of_module(text: str) -> Iterator[str]:
    """Yield the docstrings, comments, messages of errors and of logs in the source of a module."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Raise) or _is_log(node):
            yield from _constants(node)
    yield from _comments(text)


def _is_log(node: ast.AST) -> bool:
    """Whether a node calls a method of a logger."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr.upper() in _LOG_METHODS
        and "log" in ast.unparse(node.func.value).lower()
    )


def _constants(node: ast.AST) -> Iterator[str]:
    """Yield the texts in a node; an f-string is one text, with X for its values."""
    if isinstance(node, ast.JoinedStr):
        yield "".join(str(value.value) if isinstance(value, ast.Constant) else "X" for value in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        yield node.value
    else:
        for child in ast.iter_child_nodes(node):
            yield from _constants(child)


def _comments(text: str) -> Iterator[str]:
    """Yield the comments; lines of comments below each other are one."""
    block: list[str] = []
    line = -1
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != line + 1:
                yield " ".join(block)
                block = []
            block.append(token.string.lstrip("#: "))
            line = token.start[0]
    yield " ".join(block)


def faults_of_module(path: Path) -> list[str]:
    """Return the faults of a module's texts."""
    return [fault for text in texts_of_module(path.read_text()) for fault in faults(text)]


def _files(paths: list[Path], suffix: str) -> Iterator[Path]:
    for path in paths:
        yield from [path] if path.suffix == suffix else sorted(path.rglob(f"*{suffix}"))


def pages() -> list[Path]:
    """Return the pages of the project."""
    return [
        *TOP.glob("*.md"),
        *(TOP / "docs").rglob("*.md"),
        *(TOP / "deploy").glob("*.md"),
        *TOP.glob("tiered_index/**/SPEC.md"),
    ]


def passive(text: str) -> list[str]:
    """Return the sentences of a text that are in the passive voice."""
    return [sentence for sentence in sentences(text) if _PASSIVE.search(sentence)]


def _warn() -> None:
    """Print the pages with most sentences in the passive voice."""
    counts = {page: len(passive(page.read_text())) for page in pages()}
    for page, count in collections.Counter(counts).most_common(5):
        print(f"warning: {page.relative_to(TOP)}: {count} sentences in the passive voice")


def main(names: list[str]) -> int:
    """Print the faults below the paths, or the warnings."""
    if names == ["--warnings"]:
        _warn()
        return 0
    if names[:1] == ["--passive"]:
        for name in names[1:]:
            print(*passive(Path(name).read_text()), sep="\n")
        return 0
    paths = [Path(name) for name in names]
    faults_found = [(path, fault) for path in _files(paths, ".py") for fault in faults_of_module(path)]
    faults_found += [(path, fault) for path in _files(paths, ".md") for fault in faults(path.read_text())]
    for path, fault in faults_found:
        print(f"{path}: {fault}")
    return bool(faults_found)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
