"""The demos and the programs of docs/examples import only what their extras install."""

import ast
import importlib.metadata
import re
import runpy
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TOP = Path(__file__).parents[2]
OURS = ("docs", "tests", "tiered_index")
LOCKED = runpy.run_path(str(TOP / "deploy/locked.py"))
DISTRIBUTIONS = importlib.metadata.packages_distributions()
EXTRAS = {
    "tests/demo/__main__.py": ["demo"],
    "tests/demo/kafka.py": ["demo", "kafka"],
    **{
        f"docs/examples/{path.name}": ["spark"] if path.name.startswith("spark_") else []
        for path in (TOP / "docs/examples").glob("*.py")
    },
    # a package of its own, which only its tests install
    "docs/examples/redis_streams.py": ["test"],
}


def on_loading(statements: list[ast.stmt]) -> Iterator[ast.Import | ast.ImportFrom]:
    """Yield the imports of statements that run when their module is loaded, less those that may fail."""
    for statement in statements:
        if isinstance(statement, ast.Import | ast.ImportFrom):
            yield statement
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from on_loading(statement.orelse)
        elif isinstance(statement, ast.Try):
            caught = "".join(ast.dump(handler.type) for handler in statement.handlers if handler.type is not None)
            may_fail = "ImportError" in caught or "ModuleNotFoundError" in caught
            yield from on_loading(statement.handlers[0].body if may_fail else statement.body)
        elif isinstance(statement, ast.If | ast.With | ast.ClassDef):
            yield from on_loading([*statement.body, *getattr(statement, "orelse", ())])


def module_of(name: str) -> Path | None:
    """Return the file of a module of this project; None: it is none."""
    path = TOP.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


@cache
def imported(path: Path) -> frozenset[str]:
    """Return the names of all modules that a module loads itself, and of the packages above them."""
    names = set[str]()
    for statement in on_loading(ast.parse(path.read_text()).body):
        if isinstance(statement, ast.Import):
            imported = [alias.name for alias in statement.names]
        else:
            imported = [statement.module or "", *(f"{statement.module}.{alias.name}" for alias in statement.names)]
        for name in imported:
            parts = name.split(".")
            names |= {".".join(parts[: end + 1]) for end in range(len(parts))}
    return frozenset(names)


def loaded_by(program: Path) -> dict[str, Path]:
    """Return the packages of others that a program loads, each with a module of this project that imports it."""
    others, seen, waiting = dict[str, Path](), {program}, [program]
    while waiting:
        path = waiting.pop()
        for name in imported(path):
            if name.partition(".")[0] not in OURS:
                others.setdefault(name.partition(".")[0], path)
            elif (file := module_of(name)) is not None and file not in seen:
                seen.add(file)
                waiting.append(file)
    return others


@pytest.mark.parametrize("program", EXTRAS)
def test_a_program_imports_only_what_its_extras_install(program):
    """`make demo DEMO=kafka` ended in a fresh clone, because a module that it loads imported pytest."""
    names = LOCKED["needed"](LOCKED["read_lock"]((TOP / "requirements.lock").read_text()), EXTRAS[program])
    for package, module in loaded_by(TOP / program).items():
        if package not in sys.stdlib_module_names:
            of_package = {re.sub(r"[-_.]+", "-", name).lower() for name in DISTRIBUTIONS[package]}
            assert of_package & set(names), f"{module.relative_to(TOP)} imports {package}"
