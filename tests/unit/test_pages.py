"""The index lists each page, links lead somewhere, the glossary uses the code's names, records have their parts.

docs/architecture.md names the folders of the package, and the folders' imports.
"""

import ast
import functools
import re
from collections import Counter
from functools import cache
from pathlib import Path

import tiered_index
from tiered_index import errors
from tiered_index.storage.s3.options import S3Options

TOP = Path(__file__).parents[2]
DOCS = TOP / "docs"
DECISIONS = sorted((DOCS / "decisions").glob("[0-9]*.md"))
PAGES = [
    TOP / "README.md",
    TOP / "CONTRIBUTING.md",
    *sorted(DOCS.rglob("*.md")),
    *sorted((TOP / "deploy").glob("*.md")),
]
_FOLDER = re.compile(
    r"`((?:tests|tiered_index|deploy|base|cli|client|connectors|format|server|service|spark|storage)/[\w/]*)`"
)
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")


@cache
def _known_paths() -> set[str]:
    """Return every file and folder by its path and by each end of the path. Modules are also there without suffix."""
    tops = [TOP / name for name in ("tiered_index", "tests", "deploy", "docs")]
    paths = [path.relative_to(TOP) for top in tops for path in (top, *top.rglob("*"))]
    paths += [path.with_suffix("") for path in paths if path.suffix == ".py"]
    return {"/".join(path.parts[n:]) for path in paths for n in range(len(path.parts))}


def _links(page: Path) -> list[tuple[str, str]]:
    return [(target, anchor) for target, anchor in _LINK.findall(page.read_text()) if "://" not in target]


def _anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}


def test_links_lead_somewhere():
    for page in PAGES:
        for target, anchor in _links(page):
            linked = (page.parent / target).resolve() if target else page
            assert linked.exists(), f"{page}: {target}"
            assert not anchor or anchor in _anchors(linked), f"{page}: {target}#{anchor}"


def _paths(page: Path) -> set[str]:
    """Return the files and folders of the repository that a page names, and its dotted modules as paths."""
    # profiles of an earlier version name modules of that version
    text = re.sub(r"^- before: .*$", "", page.read_text(), flags=re.M)
    dotted = {name.replace(".", "/") for name in re.findall(r"^\s*from (tiered_index[\w.]*) import", text, re.M)}
    return dotted | set(re.findall(r"(?<![\w/.-])(?:[\w-]+/)*[a-z_0-9]+\.py\b", text)) | set(_FOLDER.findall(text))


def test_modules_that_a_page_names_are_there():
    missing = {(page.name, name) for page in PAGES for name in _paths(page) if name.rstrip("/") not in _known_paths()}
    assert not missing


def test_the_index_has_every_page():
    linked = {(DOCS / target).resolve() for target, _ in _links(DOCS / "README.md")}
    assert {page for page in DOCS.glob("*.md") if page.name != "README.md"} <= linked


def test_a_page_names_each_setting_of_s3():
    text = (DOCS / "storages.md").read_text()
    named = set(S3Options.uri_parameters) | {name for name in S3Options.__struct_fields__ if f"`s3.{name}`" in text}
    assert named == set(S3Options.__struct_fields__)
    assert all(f"| `{name}` |" in text for name in S3Options.uri_parameters)


def test_short_pages_stay_short():
    readme, contributing = ((TOP / name).read_text().splitlines() for name in ("README.md", "CONTRIBUTING.md"))
    assert len(readme) <= 110 and len(contributing) <= 90
    assert max(map(len, contributing)) <= 120


def test_each_page_has_at_most_3000_words():
    words = {page.name: len(page.read_text().split()) for page in (*PAGES, TOP / "CHANGELOG.md")}
    assert {name: count for name, count in words.items() if count > 3000} == {}


def test_the_readme_and_the_pages_of_docs_have_at_most_46123_words():
    pages = (TOP / "README.md", *DOCS.glob("*.md"))
    assert sum(len(page.read_text().split()) for page in pages) <= 46_123


def test_each_page_begins_with_a_command_and_its_output():
    for page in (TOP / "README.md", *DOCS.glob("*.md")):
        if page != DOCS / "README.md":  # the list of the pages
            text = page.read_text()
            example = re.search(r"^```(?:console|text)?\n((?:\$|>>>) .*?)^```", text, re.M | re.S)
            assert example and text.count("\n", 0, example.start()) < 15, page
            assert not example[1].splitlines()[-1].startswith(("$ ", ">>> ")), page


def test_troubleshooting_has_every_error_and_exit_code():
    text = (DOCS / "troubleshooting.md").read_text()
    by_code, by_error = text.split("\n## By error\n")
    codes = {"0", "1", "130", *(str(getattr(errors, name).exit_code) for name in errors.__all__)}
    rows = dict(re.findall(r"^\| (\d+) \| (.*) \|$", by_code, re.M))
    assert codes <= set(rows)
    sections = dict(re.findall(r"^### (\w+)\n\n(.*?)(?=\n### |\Z)", by_error, re.M | re.S))
    for name in errors.__all__:
        code = str(getattr(errors, name).exit_code)
        if name in {"TieredIndexError", "StorageError"}:  # the page mentions base classes in passing
            assert f"`{name}` is the base of" in by_error
            continue
        assert sections[name].startswith(f"Exit code {code}. ") and "- **Do** " in sections[name], name
        assert f"[`{name}`](#{name.lower()})" in rows[code]
    assert set(sections) <= set(errors.__all__)


def test_the_index_of_decisions_has_each_once_and_by_its_title():
    rows = re.findall(r"^\| \[(\d{4})\]\(([^)]+)\) \| (.+) \|$", (DOCS / "decisions" / "README.md").read_text(), re.M)
    titles = {page.name: page.read_text().partition("\n")[0].removeprefix("# ") for page in DECISIONS}
    assert sorted(name for _, name, _ in rows) == sorted(titles)
    for number, name, title in rows:
        assert titles[name] == f"{number} {title}"
        assert name.startswith(f"{number}-")
    numbers = [page.name[:4] for page in DECISIONS]
    assert sorted(set(numbers)) == numbers


def test_no_page_or_module_names_a_decision_that_is_gone():
    numbers = {page.name[:4] for page in DECISIONS}
    named = re.compile(r"(?:[Dd]ecisions?[ /]|decisions/)(0\d{3})\b")
    for page in [*PAGES, *(TOP / "tiered_index").rglob("*.py"), *(TOP / "tests").rglob("*.py")]:
        assert set(named.findall(page.read_text())) <= numbers, page


def test_a_decision_has_its_parts():
    for page in DECISIONS:
        text = page.read_text()
        assert re.search(r"^Status: accepted, \d{4}-\d\d-\d\d$", text, re.M), page
        assert re.findall(r"^## (.*)$", text, re.M) == ["Context", "Decision", "Consequences"], page
        assert all(part.partition("\n")[2].strip() for part in text.split("\n## ")[1:]), page


def test_the_glossary_uses_names_of_the_code():
    texts = [path.read_text() for path in (TOP / "tiered_index").rglob("*.py")]
    defined = {name for text in texts for name in re.findall(r"^ *(?:class|def) (\w+)", text, re.M)}
    text = (DOCS / "glossary.md").read_text()
    named = set(re.findall(r"`([A-Z]\w+|[a-z]+_[a-z_]+)`s?", text))
    assert len(named) >= 50
    assert named <= defined, sorted(named - defined)


PACKAGE = Path(tiered_index.__file__).parent
PAGE = (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
PICTURE = PAGE.split("```text\n")[1].split("```")[0]
_WALKED = re.compile(r"`([\w/]+\.py):\s+([\w.]+)`")


def tree() -> dict[str, str]:
    """Return the folders of the picture by their path below the package, each with what it has, in order."""
    folders, parents = {}, list[str]()
    for line in PICTURE.splitlines():
        blanks, name, has = re.fullmatch(r"( *)(\w+)/ +(\S.*)", line).groups()
        parents[len(blanks) // 2 :] = [name]
        folders["/".join(parents[1:])] = has
    return folders


def folder_of(parts: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folder of a module, or of a name in a module, by its parts below the package."""
    while parts and not PACKAGE.joinpath(*parts).is_dir():
        parts = parts[:-1]
    return parts


@functools.cache
def imports() -> dict[str, set[tuple[str, ...]]]:
    """Return the folders that the modules of each folder import when they are loaded."""
    imported: dict[str, set[tuple[str, ...]]] = {}
    for path in PACKAGE.rglob("*.py"):
        own = path.parent.relative_to(PACKAGE).parts
        folders = imported.setdefault("/".join(own), set())
        # A layer's own `__init__` re-exports its names. The `__init__` of a lower folder is a module like any other.
        shows = path.name == "__init__.py" and path.parent.parent in (PACKAGE.parent, PACKAGE)
        for node in ast.parse(path.read_text()).body if not shows else ():
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "tiered_index":
                base = tuple((node.module or "").split(".")[1:])
                folders |= {folder_of((*base, alias.name)) for alias in node.names}
        folders -= {own, ()}
    imported.pop("")
    return imported


def test_the_picture_has_each_folder_above_the_folders_that_it_imports():
    folders, imported = list(tree()), imports()
    assert sorted(folders) == sorted({"", *imported})
    for folder, below in imported.items():
        # a folder may import modules of those that hold it
        others = {"/".join(parts) for parts in below} - {folder.rsplit("/", n)[0] for n in range(1, 5)}
        above = [other for other in others if folders.index(other) < folders.index(folder)]
        assert not above, f"{folder} imports {above}"


def test_no_folder_has_more_than_16_modules_and_the_top_only_the_api():
    modules = Counter(path.parent for path in PACKAGE.rglob("*.py") if path.name != "__init__.py")
    assert {folder: count for folder, count in modules.items() if count > 16} == {}
    assert {path.stem for path in PACKAGE.glob("*.py*")} == {"__init__", "__main__", "types", "errors", "config"}


def test_the_steps_name_classes_and_functions_that_are_there():
    walked = _WALKED.findall(PAGE)
    assert len(walked) > 30
    for path, name in walked:
        body = ast.parse((PACKAGE / path).read_text()).body
        for part in name.split("."):
            definition = next((each for each in body if getattr(each, "name", "") == part), None)
            assert definition, f"{path} has no {name}"
            body = definition.body


def test_the_readme_names_each_extra_that_an_error_asks_for():
    texts = [path.read_text() for path in PACKAGE.rglob("*.py")]
    asked_for = {name for text in texts for _, name in re.findall(r"install_hint\((['\"])(\w+)\1\)", text)}
    assert asked_for >= {"kafka", "pandas", "spark"}
    (line,) = [line for line in (TOP / "README.md").read_text().splitlines() if "extras: " in line]
    assert asked_for <= {*re.findall(r"'\.\[(\w+)\]'", line)}
