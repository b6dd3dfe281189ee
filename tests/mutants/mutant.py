"""A seeded defect, and the text of the file with it. Pure."""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cache
from pathlib import Path

PACKAGE = "tiered_index"


class OutOfDate(Exception):
    """The code has the mutant's function or its snippet not exactly once, or the changed file is not valid Python."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """In `function`, `old` becomes `new`; then one of `tests` (pytest node ids) fails.

    `function` is a qualified name (`StorageLog.append`), in any module. `module.py:name` distinguishes functions of the
    same name. `old` occurs once in it, with any white space. An empty `new` deletes a statement.
    """

    name: str
    why: str
    function: str
    old: str
    new: str
    tests: tuple[str, ...]


def parsed(text: str) -> tuple[Mutant, ...]:
    """Return the mutants of a text.

    The first line of each has its name and the reason. Then come the function, old lines, new lines and tests.
    """
    return tuple(map(_parsed_one, re.split(r"\n(?=\S)", text.strip())))


def _parsed_one(text: str) -> Mutant:
    first, function, *lines = text.splitlines()
    name, _, why = first.partition(": ")
    old, new = ("\n".join(line[4:] for line in lines if line.startswith(mark)) for mark in ("  - ", "  + "))
    tests = tuple(line.strip() for line in lines if line.startswith("  tests/"))
    return Mutant(name, why, function.removeprefix("  in "), old, new, tests)


def mutate(mutant: Mutant, package: Path) -> tuple[Path, str]:
    """Return the file of the defect below `package`, and its text with the defect.

    Raises `OutOfDate`.
    """
    module, _, name = mutant.function.rpartition(":")
    header = f"def {name.rpartition('.')[2]}("
    files = [path for path in _files(package) if str(path).endswith(module) and header in _text(path)]
    candidates = [(path, place) for path in files for place in _functions(path).get(name, [])]
    if len(candidates) != 1:
        raise OutOfDate(f"out of date: {len(candidates)} functions are called {mutant.function}, not one")
    path, (first_line, last_line, column) = candidates[0]
    source = path.read_text()
    lines = source.splitlines(keepends=True)
    start, end = (sum(map(len, lines[:at])) for at in (first_line - 1, last_line))
    snippet = re.compile(r"\s*".join(re.escape(token) for token in re.findall(r"\w+|[^\w\s]", mutant.old)))
    places = list(snippet.finditer(source, start, end))
    if len(places) != 1:
        raise OutOfDate(f"out of date: {mutant.function} holds its snippet {len(places)} times, not once")
    first, last = places[0].span()
    indent = re.match(r"[ \t]*", source[source.rfind("\n", 0, first) + 1 :])
    # an empty body is invalid: `pass` replaces a deleted statement that was the only one
    for new in (mutant.new, *(["pass"] if not mutant.new else [])):
        changed = new.replace("\n", "\n" + indent[0])
        mutated = source[:first] + changed + source[last:]
        # the function alone, which may be indented, is quicker to parse than its file
        if _is_python("if True:\n" * (column > 0) + source[start:first] + changed + source[last:end]):
            break
    else:
        raise OutOfDate("out of date: no Python with the defect in it")
    if mutated == source:
        raise OutOfDate("out of date: it changes nothing")
    return path, mutated


def _is_python(text: str) -> bool:
    try:
        ast.parse(text)
    except SyntaxError:
        return False
    return True


@cache
def _files(package: Path) -> list[Path]:
    return sorted(package.rglob("*.py"))


@cache
def _text(path: Path) -> str:
    return path.read_text()


@cache
def _functions(path: Path) -> dict[str, list[tuple[int, int, int]]]:
    """Return the first and last lines of a file's functions and their columns, by qualified names.

    The syntax trees would stay: millions of objects for each later garbage collection.
    """
    functions: dict[str, list[tuple[int, int, int]]] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                if not isinstance(child, ast.ClassDef):
                    place = (child.lineno, child.end_lineno or child.lineno, child.col_offset)
                    functions.setdefault(prefix + child.name, []).append(place)
                walk(child, f"{prefix}{child.name}.")
            elif not isinstance(child, ast.expr):  # an expression has no functions
                walk(child, prefix)

    walk(ast.parse(_text(path)), "")
    return functions


_FAILED = 1
"""pytest's exit code if tests ran and one failed; other codes mean usage, collection or an interrupt."""


class Verdict(Enum):
    """The result of the tests."""

    RED = "red"
    TIMEOUT = "red by timeout"
    GREEN = "green"
    INVALID = "proves nothing"


def judge(tests: Sequence[str], code: int, output: str) -> Verdict:
    """Return RED if a named test itself failed. A failure before or after a test is an ERROR for pytest."""
    if code == 0:
        return Verdict.GREEN
    starts = [f"FAILED {test}{end}" for test in tests for end in ("[", "::", " ", "\n")]
    failed = any(f"{line}\n".startswith(tuple(starts)) for line in output.splitlines())
    return Verdict.RED if code == _FAILED and failed else Verdict.INVALID
