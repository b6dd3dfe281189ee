"""Each layer imports only downwards (docs/architecture.md). Imports are at the top, so functions hide no cycle."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tiered_index

PACKAGE = Path(tiered_index.__file__).parent
LAZY = {
    ("config.py", "tiered_index.base.conversion"): "most readers have only a URI and paths, which need no conversion",
    ("base/kernels.py", "tiered_index.base"): "only a package in a zip file needs it",
    ("service/read/lookups.py", "tiered_index.service.read.export"): "a lookup of one key needs no Arrow",
    ("spark/session.py", "tiered_index.spark.datasource.entries"): "sources are subclasses of classes of PySpark",
    ("spark/session.py", "tiered_index.spark.datasource.messages"): "the same",
    ("spark/session.py", "tiered_index.spark.datasource.lookup_function"): "the same",
}
# Modules of connectors that others use without the registry. A spec has options and words, and may be used by all
OUTSIDE = {
    ("__init__.py", "files"): "FileRows is a public name",
    ("cli/look_up", "files.rows"): "a file of lookups has rows of any form",
    ("cli/look_up", "rocketmq.log"): "--tag, and the properties of a message that have lines of their own",
    ("cli/operate/serving.py", "rocketmq.remoting"): "the listener of RocketMQ's tools",
    ("cli/spark/build.py", "files"): "the options of a build of files, and what it tells of them",
    ("cli/write/archived.py", "rocketmq"): "ingest archive: the segments of its stores are bytes, not columns",
    ("cli/write/exported.py", "files.rows"): "a file of an export has rows of any form",
    ("cli/write/ingest.py", "files"): "a file of messages is put by the command itself, without positions of rows",
    ("cli/write/linking.py", "files"): "shows the counts of a run of files",
    ("server/entries.py", "files.rows"): "a request has rows of any form",
    ("server/remoting.py", "rocketmq.remoting"): "RocketMQ's protocol, a listener of its own",
    ("spark", "files"): "executors read rows of files, for builds and lookups",
    ("spark", "rocketmq"): "executors read commit logs, for builds and the data source of messages",
}
INDENTED = re.compile(r"^[ \t]+(from|import) +(tiered_index|\.)", re.MULTILINE)
OURS = {"files", "kafka", "rocketmq"}
LAZY_FOLDERS = {"cli": "a command loads only what it needs, so that --help is there at once"}


def indented_imports():
    """Yield (path below the package, syntax tree) of every module that imports one of ours on an indented line."""
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        if relative.parts[0] not in LAZY_FOLDERS and INDENTED.search(text := path.read_text()):
            yield relative, ast.parse(text, str(path))


def imports(tree):
    """Yield (node, imported module) of every import. A name that is imported from a package counts as its module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            if node.module == "tiered_index":
                for alias in node.names:
                    yield node, f"tiered_index.{alias.name}"
            else:
                yield node, node.module


def linted(folder):
    """Return the process that checked the contracts of the pyproject.toml of a folder."""
    # a separate process, because the linter sets up the logging of its process
    command = [sys.executable, "-c", "import sys, importlinter.cli as cli; sys.exit(cli.lint_imports(no_cache=True))"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


def test_a_module_imports_only_what_lies_below_it():
    """pyproject.toml declares the layers, and the folders of each."""
    checked = linted(PACKAGE.parent)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("folder", "back"),
    [
        (".", ""),
        ("storage", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    "),
        ("storage/s3", "def later():\n    "),
    ],
)
def test_a_circle_of_modules_is_refused(tmp_path, folder, back):
    """Also if one of its imports is only for types, or within a function."""
    settings = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text())["tool"]["importlinter"]
    contracts = [contract for contract in settings.pop("contracts") if contract["type"] == "acyclic_siblings"]
    lines = ["[tool.importlinter]", *(f"{name} = {json.dumps(value)}" for name, value in settings.items())]
    for contract in contracts:
        lines += ["[[tool.importlinter.contracts]]", *(f"{name} = {json.dumps(to)}" for name, to in contract.items())]
    (tmp_path / "pyproject.toml").write_text("\n".join(lines))
    package = Path("tiered_index", folder)
    (tmp_path / package).mkdir(parents=True)
    for part in (package, *package.parents[:-1]):
        (tmp_path / part / "__init__.py").touch()
    name = ".".join(package.parts)
    (tmp_path / package / "one.py").write_text(f"import {name}.two\n")
    (tmp_path / package / "two.py").touch()
    assert linted(tmp_path).returncode == 0
    (tmp_path / package / "two.py").write_text(f"{back}import {name}.one\n")
    refused = linted(tmp_path)
    assert refused.returncode == 1 and f"No cycles are allowed in {name}." in refused.stdout


def test_imports_are_at_the_top():
    """`if TYPE_CHECKING` and a `try` of the module also count as the top."""
    top, wrong = ast.Import | ast.ImportFrom | ast.If | ast.Try, []
    for relative, tree in indented_imports():
        below = [each for outer in tree.body if not isinstance(outer, top) for each in imports(outer)]
        for _, name in below:
            if name.split(".")[0] == "tiered_index" and (str(relative), name) not in LAZY:
                wrong.append(f"{relative} imports {name} inside a function")
    assert not wrong


def test_each_permitted_late_import_still_exists():
    for relative, name in LAZY:
        imported_names = {imported for _, imported in imports(ast.parse((PACKAGE / relative).read_text()))}
        assert name in imported_names, f"{relative} no longer imports {name}"


def test_modules_outside_connectors_use_one_only_by_the_registry():
    used = set()
    for path in PACKAGE.rglob("*.py"):
        relative = path.relative_to(PACKAGE).as_posix()
        if relative.startswith("connectors/"):
            continue
        for _, name in imports(ast.parse(path.read_text(), str(path))):
            connector, _, module = name.removeprefix("tiered_index.connectors.").partition(".")
            if name.startswith("tiered_index.connectors.") and connector in OURS and module != "spec":
                rules = [rule for rule in OUTSIDE if f"{connector}.{module}.".startswith(f"{rule[1]}.")]
                allowed = [rule for rule in rules if f"{relative}/".startswith(f"{rule[0]}/")]
                assert allowed, f"{relative} imports {name}: ask tiered_index.connectors.registry"
                used |= {*allowed}
    assert used == OUTSIDE.keys(), "each exception is still needed"


# `rocketmq` is also the name of a format of index files, and `files` is a common word
FORMATS, OF_CONNECTOR = ("form", "preset", "preset.name"), ("name", "connector")
PREFIX = re.compile(r"(kafka|rocketmq|files|rows|points)[:-]")
NAMING = {"startswith", "removeprefix", "partition", "match", "fullmatch"}


def names_of_connectors(tree):
    """Yield (line, name) of each test of a connector's name, or of a name that begins with one."""
    names = OURS | {"redis"}

    def told(node):
        for part in [node, *getattr(node, "elts", ())]:
            if isinstance(part, ast.Constant) and isinstance(part.value, str) and part.value in names:
                yield part.value
            elif isinstance(part, ast.Name | ast.Attribute) and ast.unparse(part).split(".")[-1] in ROLES:
                yield ast.unparse(part)

    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            texts = [ast.unparse(side) for side in sides]
            for name in (name for side in sides for name in told(side)):
                is_format = name == "rocketmq" and any(text.endswith(FORMATS) for text in texts)
                is_word = name == "files" and not any(text.endswith(OF_CONNECTOR) for text in texts)
                if not (is_format or is_word):
                    yield node.lineno, name
        elif isinstance(node, ast.MatchValue):
            yield from ((node.lineno, name) for name in told(node.value))
        elif isinstance(node, ast.Dict):
            keys = (key for key in node.keys if key is not None)
            yield from ((node.lineno, name) for key in keys for name in told(key) if name != "files")
        elif isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in NAMING:
            texts = [part for each in node.args for part in [each, *getattr(each, "elts", ())]]
            values = (part.value for part in texts if isinstance(part, ast.Constant) and isinstance(part.value, str))
            yield from ((node.lineno, value) for value in values if PREFIX.match(value))


ROLES = {"FILES", "OF_OTHERS"}


@pytest.mark.parametrize(
    "code",
    [
        'spec.name == "kafka"',
        'name in ("redis", other)',
        "spec.name != FILES",
        "registry.OF_OTHERS == spec.name",
        'match name:\n    case "rocketmq": pass',
        '{"kafka": options}[spec.name]',
        'position.startswith("kafka:")',
        'store.startswith((x, "rows:"))',
    ],
)
def test_a_test_of_the_name_of_a_connector_is_found(code):
    assert [*names_of_connectors(ast.parse(code))]


def test_only_a_connector_tests_its_name():
    """Others ask the registry, and read what a spec or a document says."""
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        parts = path.relative_to(PACKAGE).parts
        if not (parts[0] == "connectors" and parts[1] in OURS):
            tree = ast.parse(path.read_text(), str(path))
            wrong += [f"{'/'.join(parts)}:{line} tests {name!r}" for line, name in names_of_connectors(tree)]
    assert not wrong


def test_the_format_has_no_files_clocks_and_threads():
    for path in (PACKAGE / "format").rglob("*.py"):
        names = {name.split(".")[0] for _, name in imports(ast.parse(path.read_text()))}
        assert not names & {"os", "pathlib", "mmap", "threading", "time", "socket", "logging", "boto3", "io"}, path


def test_the_engine_knows_no_broker_by_the_name_of_kafka():
    for folder in ("service", "format"):
        for path in (PACKAGE / folder).rglob("*"):
            if path.suffix in {".py", ".md"}:
                assert "kafka" not in path.read_text().lower(), path
