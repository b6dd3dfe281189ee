"""Names say what they hold, and two classes have two names."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[2]
SAY_NOTHING = {"one", "found", "given", "asked", "kept"}
# and in the package, but for the folders that still have some
SAY_NOTHING_IN_PACKAGE, STILL = {"told", "each"}, ("tiered_index/connectors/files/", "tiered_index/spark/")
# what may follow a name that is bound: most files need not be parsed
BOUND = re.compile(rf"\b({'|'.join(SAY_NOTHING | SAY_NOTHING_IN_PACKAGE)})\b\s*([,:)\]=]|in\b|[-+*/|&]=)")
FOLDERS = ["tiered_index", "deploy", "docs", "tests"]
# its models have the names of the documents that they describe
MODELS = "tiered_index/server/http/answers.py"


def trees(*folders: str, having: re.Pattern[str]) -> Iterator[tuple[str, ast.Module]]:
    """Yield the path and the tree of each module with such text."""
    for folder in folders:
        for path in sorted((TOP / folder).rglob("*.py")):
            if having.search(text := path.read_text()):
                yield str(path.relative_to(TOP)), ast.parse(text)


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each variable and parameter; beside `expected`, the parameter `found` says enough.

    Fields of a class are left out: its docstring describes them.
    """
    classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    fields = {part.target for node in classes for part in node.body if isinstance(part, ast.AnnAssign)}
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            parameters = [a for a in (*node.posonlyargs, *node.args, node.vararg, *node.kwonlyargs, node.kwarg) if a]
            is_comparison = any(a.arg == "expected" for a in parameters)
            yield from ((a.lineno, a.arg) for a in parameters if not (is_comparison and a.arg == "found"))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node not in fields:
            yield node.lineno, node.id


def test_no_variable_has_a_name_that_says_nothing() -> None:
    nameless = [
        f"{path}:{line}: {name}"
        for path, tree in trees(*FOLDERS, having=BOUND)
        for line, name in names(tree)
        if name in SAY_NOTHING
        or (name in SAY_NOTHING_IN_PACKAGE and path.startswith("tiered_index/") and not path.startswith(STILL))
    ]
    assert not nameless


def test_no_two_classes_have_one_name() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees("tiered_index", having=re.compile(r"^ *class ", re.M)):
        if path != MODELS:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path)
    assert not {name: paths for name, paths in places.items() if len(paths) > 1}
