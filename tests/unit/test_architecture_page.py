"""docs/architecture.md names the folders and files of the package, and the folders' imports."""

import ast
import functools
import re
from pathlib import Path

import tiered_index

PACKAGE = Path(tiered_index.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
PICTURE = PAGE.split("```text\n")[1].split("```")[0]
LAYERS = {
    name: set(targets.split()) for name, targets in re.findall(r"^(\w+)/ +→((?: \w+)*)(?:  |$)", PICTURE, re.MULTILINE)
}
FOLDERS = {
    name: set(targets.split())
    for name, targets in re.findall(r"^  ([\w/]+)/ +←→((?: [\w/.]+)*)", PICTURE, re.MULTILINE)
}
STEPS = {
    part.partition("\n")[0]: re.findall(r"^\d+\. `([\w/]+\.py)", part, re.MULTILINE) for part in PAGE.split("\n## ")[4:]
}


def folder_of(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folder of a module, or of a name in a module, by its parts below the package."""
    while parts and not PACKAGE.joinpath(*parts).is_dir():
        parts = parts[:-1]
    return parts


@functools.cache
def imports() -> dict[str, set[tuple[str, ...]]]:
    """Return the folders that the modules of each folder import when they are loaded."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for path in PACKAGE.rglob("*.py"):
        own = path.parent.relative_to(PACKAGE).parts
        folders = found.setdefault("/".join(own), set())
        # A layer's own `__init__` re-exports its names. The `__init__` of a lower folder is a module like any other.
        shows = path.name == "__init__.py" and path.parent.parent in (PACKAGE.parent, PACKAGE)
        for node in ast.parse(path.read_text()).body if not shows else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tiered_index":
                base = tuple((node.module or "").split(".")[1:])
                folders |= {folder_of((*base, alias.name)) for alias in node.names}
        folders -= {own, ()}
    found.pop("")
    return found


def test_the_picture_has_every_folder_and_no_other():
    assert set(FOLDERS) == set(imports())
    assert set(LAYERS) == {name.split("/")[0] for name in imports()}


def test_layers_import_what_the_picture_says():
    found = {layer: set() for layer in LAYERS}
    for name, folders in imports().items():
        layer = name.split("/")[0]
        found[layer] |= {folder[0] for folder in folders} - {layer}
    assert found == LAYERS
    order = list(LAYERS)
    assert all(order.index(below) > order.index(layer) for layer, names in LAYERS.items() for below in names)


def test_a_folder_imports_what_the_picture_says():
    for name, folders in imports().items():
        layer = name.split("/")[0]
        assert FOLDERS[name] == {"/".join(folder[1:]) or "." for folder in folders if folder[0] == layer}, name


def test_folders_of_the_service_import_only_later_ones():
    order = [name.removeprefix("service/") for name in FOLDERS if name.startswith("service")]
    assert order[0] == "service"
    for name in order[1:]:
        assert all(order.index(below) > order.index(name) for below in FOLDERS[f"service/{name}"])


def test_four_sections_have_at_most_twelve_steps():
    assert len(STEPS) == 4
    for section, steps in STEPS.items():
        numbered = PAGE.split(f"\n## {section}\n")[1].split("\n## ")[0]
        assert 6 <= len(steps) <= 12
        assert len(re.findall(r"^\d+\. ", numbered, re.MULTILINE)) == len(steps)


def test_each_step_names_a_file():
    for file in {file for steps in STEPS.values() for file in steps}:
        assert (PACKAGE / file).is_file(), file


def test_every_file_that_the_page_names_is_there():
    for name in re.findall(r"\b([a-z_]+\.py)\b", PAGE):
        assert any(list((PACKAGE.parent / folder).rglob(name)) for folder in ("tiered_index", "tests")), (
            f"the page names {name}, which does not exist"
        )
