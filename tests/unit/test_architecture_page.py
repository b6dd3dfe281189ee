"""docs/architecture.md names the rooms, their imports and the files that there are."""

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
ROOMS = {
    name: set(targets.split())
    for name, targets in re.findall(r"^  ([\w/]+)/ +←→((?: [\w/.]+)*)", PICTURE, re.MULTILINE)
}
WAYS = {
    part.partition("\n")[0]: re.findall(r"^\d+\. `([\w/]+\.py)", part, re.MULTILINE) for part in PAGE.split("\n## ")[3:]
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
        # a layer's own `__init__` shows what it offers; that of a room is a module of it
        shows = path.name == "__init__.py" and path.parent.parent in (PACKAGE.parent, PACKAGE)
        for node in ast.parse(path.read_text()).body if not shows else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tiered_index":
                base = tuple((node.module or "").split(".")[1:])
                folders |= {folder_of((*base, alias.name)) for alias in node.names}
        folders -= {own, ()}
    found.pop("")
    return found


def test_the_picture_has_every_folder_and_no_other():
    assert set(ROOMS) == set(imports())
    assert set(LAYERS) == {name.split("/")[0] for name in imports()}


def test_layers_import_what_the_picture_says():
    found = {layer: set() for layer in LAYERS}
    for name, folders in imports().items():
        layer = name.split("/")[0]
        found[layer] |= {folder[0] for folder in folders} - {layer}
    assert found == LAYERS
    order = list(LAYERS)
    assert all(order.index(below) > order.index(layer) for layer, names in LAYERS.items() for below in names)


def test_a_room_imports_what_the_picture_says():
    for name, folders in imports().items():
        layer = name.split("/")[0]
        assert ROOMS[name] == {"/".join(folder[1:]) or "." for folder in folders if folder[0] == layer}, name


def test_rooms_of_the_service_import_only_what_stands_below():
    order = [name.removeprefix("service/") for name in ROOMS if name.startswith("service")]
    assert order[0] == "service"
    for name in order[1:]:
        assert all(order.index(below) > order.index(name) for below in ROOMS[f"service/{name}"])


def test_four_ways_have_at_most_twelve_stops():
    assert len(WAYS) == 4
    for way, stops in WAYS.items():
        numbered = PAGE.split(f"\n## {way}\n")[1].split("\n## ")[0]
        assert 6 <= len(stops) <= 12
        assert len(re.findall(r"^\d+\. ", numbered, re.MULTILINE)) == len(stops)


def test_a_stop_is_in_a_file():
    for file in {stop for stops in WAYS.values() for stop in stops}:
        assert (PACKAGE / file).is_file(), file


def test_every_file_that_the_page_names_is_there():
    for name in re.findall(r"\b([a-z_]+\.py)\b", PAGE):
        assert any(list((PACKAGE.parent / folder).rglob(name)) for folder in ("tiered_index", "tests")), (
            f"the page names {name}, which is not there"
        )
