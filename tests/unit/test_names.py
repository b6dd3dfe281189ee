"""Names say what they hold, and two classes have two names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[2]
SAY_NOTHING = {"one", "found", "given", "asked", "kept"}
# folders, and the modules at the top of the package
FOLDERS = [
    *(f"tiered_index/{path.name}" for path in sorted((TOP / "tiered_index").glob("*.py"))),
    *(f"tiered_index/{name}" for name in ("sources", "kafka", "rocketmq", "cli", "server", "client", "format")),
    *("deploy", "docs", "tests"),
]
# its models have the names of the documents that they describe
MODELS = "tiered_index/server/answers.py"


def trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        place = TOP / folder
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            yield str(path.relative_to(TOP)), ast.parse(path.read_text())


def names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and name of each variable and parameter; beside `expected`, the parameter `found` says enough."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            parameters = [a for a in (*node.posonlyargs, *node.args, node.vararg, *node.kwonlyargs, node.kwarg) if a]
            is_comparison = any(a.arg == "expected" for a in parameters)
            yield from ((a.lineno, a.arg) for a in parameters if not (is_comparison and a.arg == "found"))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id


def test_no_variable_has_a_name_that_says_nothing() -> None:
    nameless = [
        f"{path}:{line}: {name}" for path, tree in trees(*FOLDERS) for line, name in names(tree) if name in SAY_NOTHING
    ]
    assert not nameless


def test_no_class_of_these_folders_has_the_name_of_another_class() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees("tiered_index"):
        if path != MODELS:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path)
    here = tuple(folder if folder.endswith(".py") else f"{folder}/" for folder in FOLDERS)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not {name: paths for name, paths in shared.items() if any(path.startswith(here) for path in paths)}
