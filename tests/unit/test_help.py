"""`help()` of each public name is readable: no memory address, a first sentence on one line, and a page to read."""

import ast
import dataclasses
import importlib
import inspect
import pydoc
import re
import textwrap
from collections.abc import Iterator

import pytest
from msgspec import Struct

from tiered_index import IndexConfig
from tiered_index.config import TABLES

MODULES = [
    "tiered_index",
    "tiered_index.client",
    "tiered_index.errors",
    "tiered_index.connectors.follow",
    "tiered_index.connectors.source",
    "tiered_index.service.metrics",
    "tiered_index.spark",
    "tiered_index.storage.base",
]


def values(name: str) -> dict[str, object]:
    """Return the public classes and functions of a module."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [each for each in vars(module) if not each.startswith("_")]
        public = {each: getattr(module, each) for each in names}
        return {each: value for each, value in public.items() if getattr(value, "__module__", None) == name}
    return {each: getattr(module, each) for each in names if each != "__version__"}


def documented(name: str, value: object) -> Iterator[tuple[str, object]]:
    """Yield a class or function, and the public methods and properties of a class, with their names."""
    yield name, value
    if not inspect.isclass(value):
        return
    for each in dir(value):
        owner = next(base for base in value.__mro__ if each in vars(base) or base is object)
        member = inspect.getattr_static(value, each)
        member = member.__func__ if isinstance(member, classmethod | staticmethod) else member
        is_ours = not each.startswith("_") and owner.__module__.startswith("tiered_index")
        if is_ours and (inspect.isfunction(member) or isinstance(member, property)):
            yield f"{name}.{each}", member


def fields(kind: type) -> list[str]:
    """Return the public fields of a dataclass or named tuple, without settings, which docs/reference.md lists."""
    if dataclasses.is_dataclass(kind):
        names = [each.name for each in dataclasses.fields(kind) if "description" not in each.metadata]
    else:
        names = list(getattr(kind, "_fields", ()))
    return [name for name in names if not name.startswith("_")]


def explained(kind: type) -> set[str]:
    """Return the names in the docstring of a class, and of its bases, and the fields with a docstring below them."""
    names: set[str] = set()
    for each in kind.__mro__:
        if each.__module__.startswith("tiered_index"):
            names.update(re.findall(r"`([a-z0-9_]+)`", each.__doc__ or ""))
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
            assert isinstance(tree, ast.ClassDef)
            for field, below in zip(tree.body, tree.body[1:], strict=False):
                if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                    names.add(ast.unparse(field.target))
    return names


@pytest.mark.parametrize("module", MODULES)
def test_help_explains_each_field(module: str) -> None:
    kinds = {name: value for name, value in values(module).items() if inspect.isclass(value)}
    missing = {name: set(fields(kind)) - explained(kind) for name, kind in kinds.items()}
    assert not {name: some for name, some in missing.items() if some}


@pytest.mark.parametrize("kind", [IndexConfig, *TABLES.values()], ids=lambda kind: kind.__name__)
def test_help_explains_each_setting(kind: type[Struct]) -> None:
    shown = pydoc.plain(pydoc.render_doc(kind))
    assert re.findall(r"- `(\w+)`: \S", shown) == list(kind.__struct_fields__)


@pytest.mark.parametrize("module", MODULES)
def test_help_begins_with_a_sentence_on_one_line(module: str) -> None:
    every = [pair for name, value in values(module).items() for pair in documented(name, value)]
    docs = {name: (inspect.getdoc(value) or "").partition("\n")[0] for name, value in every}
    assert not {name: line for name, line in docs.items() if not line.endswith(".")}
