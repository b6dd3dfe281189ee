"""`help()` of each public name is readable: no memory address, a first sentence on one line, and a page to read."""

import importlib
import inspect
import pydoc
from collections.abc import Iterator

import pytest

MODULES = [
    "tiered_index",
    "tiered_index.client",
    "tiered_index.errors",
    "tiered_index.follow",
    "tiered_index.metrics",
    "tiered_index.spark",
    "tiered_index.storage.base",
]


def values(name: str) -> dict[str, object]:
    """Return the public classes and functions of a module."""
    module = importlib.import_module(name)
    names = getattr(module, "__all__", None)
    if names is None:
        names = [each for each in vars(module) if not each.startswith("_")]
        found = {each: getattr(module, each) for each in names}
        return {each: value for each, value in found.items() if getattr(value, "__module__", None) == name}
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


@pytest.mark.parametrize("module", MODULES)
def test_help_has_no_memory_address(module: str) -> None:
    found = {name: pydoc.render_doc(value, renderer=pydoc.plaintext) for name, value in values(module).items()}
    assert found
    assert not [(name, line) for name, text in found.items() for line in text.splitlines() if " at 0x" in line]


@pytest.mark.parametrize("module", MODULES)
def test_help_begins_with_a_sentence_on_one_line(module: str) -> None:
    every = [pair for name, value in values(module).items() for pair in documented(name, value)]
    docs = {name: (inspect.getdoc(value) or "").partition("\n")[0] for name, value in every}
    assert not {name: line for name, line in docs.items() if not line.endswith(".")}


@pytest.mark.parametrize("module", [*MODULES, "tiered_index.testing"])
def test_help_of_a_module_names_a_page(module: str) -> None:
    assert "docs/" in (importlib.import_module(module).__doc__ or "")
