"""Names say what they hold, and two classes have two names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

TOP = Path(__file__).parents[2]
SAY_NOTHING = {"one", "found", "given", "asked", "kept"}
FOLDERS = [
    *(f"tiered_index/{name}" for name in ("sources", "kafka", "rocketmq", "cli", "server")),
    *("docs/generators", "tests/support"),
]
# its models have the names of the documents that they describe
MODELS = "tiered_index/server/answers.py"


def trees(*folders: str) -> Iterator[tuple[str, ast.Module]]:
    for folder in folders:
        for path in sorted((TOP / folder).rglob("*.py")):
            yield str(path.relative_to(TOP)), ast.parse(path.read_text())


def test_no_variable_has_a_name_that_says_nothing() -> None:
    nameless = [
        f"{path}:{node.lineno}: {name}"
        for path, tree in trees(*FOLDERS)
        for node in ast.walk(tree)
        for name in [
            node.arg
            if isinstance(node, ast.arg)
            else node.id
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            else ""
        ]
        if name in SAY_NOTHING
    ]
    assert not nameless


def test_no_class_of_these_folders_has_the_name_of_another_class() -> None:
    places: defaultdict[str, list[str]] = defaultdict(list)
    for path, tree in trees("tiered_index"):
        if path != MODELS:
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(path)
    here = tuple(f"{folder}/" for folder in FOLDERS)
    shared = {name: paths for name, paths in places.items() if len(paths) > 1}
    assert not {name: paths for name, paths in shared.items() if any(path.startswith(here) for path in paths)}
