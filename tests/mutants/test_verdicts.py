"""The mutation check on a small made-up tree: red is red for the right reason, and what proves nothing is not called
red.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.mutants import __main__ as program
from tests.mutants.campaign import judge, prepared_copies, run_campaign, try_mutant
from tests.mutants.catalogue import MUTANTS
from tests.mutants.copies import NotTheCopy, Run
from tests.mutants.mutant import PACKAGE, Mutant, Verdict, mutate

# `make test-all` runs these and the mutants themselves
pytestmark = pytest.mark.slow

SUM = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    while a < 0:\n        a = -a\n    return a * 2\n"
TESTS = """
import pytest
from tiered_index import sums

@pytest.fixture
def three():
    assert sums.add(1, 2) == 3
    return 3

@pytest.mark.parametrize("b", [2, 3])
def test_add(b):
    assert sums.add(1, b) == 1 + b

def test_twice():
    assert sums.twice(-2) == 4

def test_fixture(three):
    assert three == 3

def test_red():
    assert sums.add(1, 1) == 3

def test_nothing():
    pass
"""
SETTINGS = (
    "[tool.pytest.ini_options]\naddopts = '--import-mode=importlib -p no:hypothesispytest -p no:xdist -p no:anyio'\n"
)
OUTSIDE = "def test_nothing_of_ours():\n    pass\n"


def a_mutant(name: str, old: str, new: str, test: str, function: str = "add") -> Mutant:
    return Mutant(name, "for a test", function, old, new, (f"tests/test_sums.py::{test}",))


MADE_UP = {
    a_mutant("red", "a + b", "a - b", "test_add"): Verdict.RED,
    a_mutant("red again", "a + b", "a + b + 1", "test_add[3]"): Verdict.RED,
    a_mutant("survivor", "a * 2", "a + 2", "test_twice", "sums.py:twice"): Verdict.SURVIVED,
    a_mutant("import error", "def add(a, b)", "import nowhere\ndef add(a, b)", "test_add"): Verdict.INVALID,
    a_mutant("no Python", "def add(a, b):", "def add(a, b)", "test_add"): Verdict.INVALID,
    a_mutant("changes nothing", "a + b", "a + b", "test_add"): Verdict.INVALID,
    a_mutant("out of date", "a / b", "a - b", "test_add"): Verdict.INVALID,
    a_mutant("snippet twice", "b", "a", "test_add"): Verdict.INVALID,
    a_mutant("no such function", "a + b", "a - b", "test_add", "gone"): Verdict.INVALID,
    a_mutant("red in a fixture", "a + b", "a * b", "test_fixture"): Verdict.INVALID,
    a_mutant("red before", "a + b", "a - b", "test_red"): Verdict.INVALID,
    a_mutant("no such test", "a + b", "a - b", "test_gone"): Verdict.INVALID,
}


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository of one module, not committed yet."""
    folder = tmp_path_factory.mktemp("tree")
    for name, text in {
        "tiered_index/__init__.py": "",
        "tiered_index/sums.py": SUM,
        "tests/test_sums.py": TESTS,
        "tests/test_outside.py": OUTSIDE,
        ".gitignore": "ignored\n",
        "ignored/big": "x",
        "pyproject.toml": SETTINGS,
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=folder, check=True)
    return folder


def test_each_verdict(tree: Path) -> None:
    before = {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()}
    told: list[int] = []
    with prepared_copies(tree, 2) as copies:
        assert not any((copy.folder / "ignored").exists() for copy in copies)
        results = run_campaign(list(MADE_UP), copies, 300, lambda done, what: told.append(done))
        assert {result.mutant.name: result.verdict for result in results} == {
            m.name: verdict for m, verdict in MADE_UP.items()
        }
        assert [result.mutant for result in results] == list(MADE_UP)
        assert all((copy.folder / "tiered_index/sums.py").read_text() == SUM for copy in copies)
    by_name = {result.mutant.name: result for result in results}
    assert by_name["red"].detail == "tests/test_sums.py::test_add[2]"
    assert (by_name["red"].line, by_name["survivor"].line) == (2, 8)
    assert "holds its snippet 0 times" in by_name["out of date"].detail
    assert "add holds its snippet 2 times" in by_name["snippet twice"].detail
    assert "not green without any defect" in by_name["red before"].detail
    assert told == list(range(len(MADE_UP) + 1))
    assert not any(copy.folder.exists() for copy in copies)
    assert {path: path.read_bytes() for path in tree.rglob("*") if path.is_file()} == before


def test_a_run_without_end_is_ended(tree: Path) -> None:
    endless = a_mutant("endless", "a=-a", "a = a", "test_twice", "twice")
    with prepared_copies(tree, 1) as (copy,):
        result = try_mutant(endless, copy, 2, {})
        assert result.verdict is Verdict.TIMEOUT
        assert (copy.folder / "tiered_index/sums.py").read_text() == SUM


def test_tests_that_do_not_import_the_copy_say_nothing(tree: Path) -> None:
    with prepared_copies(tree, 1) as (copy,):
        with pytest.raises(NotTheCopy, match="without importing"):
            copy.run(["tests/test_outside.py"], 60)
        # what is installed in this environment takes its place
        (copy.folder / "tiered_index").rename(copy.folder / "elsewhere")
        (copy.folder / "tests/test_sums.py").write_text(
            "import tiered_index\n\ndef test_add():\n    assert tiered_index\n"
        )
        with pytest.raises(NotTheCopy, match="not from"):
            copy.run(["tests/test_sums.py"], 60)


ADD = a_mutant("add", "a + b", "a - b", "test_add")
NODE = ADD.tests[0]


@pytest.mark.parametrize(
    ("run", "verdict"),
    [
        (Run(1, (), ((NODE, "call"),), "", 0), Verdict.RED),
        (Run(1, (), ((f"{NODE}[2]", "call"),), "", 0), Verdict.RED),
        (Run(1, (), ((f"{NODE}itional", "call"),), "", 0), Verdict.INVALID),
        (Run(1, (), ((NODE, "setup"),), "", 0), Verdict.INVALID),
        (Run(1, (NODE,), ((NODE, "teardown"),), "", 0), Verdict.INVALID),
        (Run(0, (NODE,), (), "", 0), Verdict.SURVIVED),
        (Run(None, (), (), "", 0), Verdict.TIMEOUT),
        *((Run(code, (), ((NODE, "call"),), "", 0), Verdict.INVALID) for code in (2, 3, 4, 5, -11)),
    ],
    ids=lambda value: value.value if isinstance(value, Verdict) else f"code {value.code}",
)
def test_red_is_a_failed_call_of_a_named_test(run: Run, verdict: Verdict) -> None:
    assert judge(ADD, run)[0] is verdict
    assert verdict.is_red is (verdict in (Verdict.RED, Verdict.TIMEOUT))


def test_names_are_given_once_and_each_defect_finds_its_place() -> None:
    names = [mutant.name for mutant in MUTANTS]
    assert len(names) == len(set(names)) >= 100
    for mutant in MUTANTS:
        mutate(mutant, program.TOP / PACKAGE)
        assert all((program.TOP / test.split("::")[0]).is_file() for test in mutant.tests)


def test_the_list_needs_no_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert program.main(["--list", "--json", "--only", "journal-*"]) == 0
    listed = json.loads(capsys.readouterr().out)["mutants"]
    assert (
        {entry["name"] for entry in listed}
        == {mutant.name for mutant in MUTANTS if mutant.name.startswith("journal-")}
        != set()
    )
    assert program.main(["--only", "nothing of that name"]) == 2
    assert "nothing of that name" in capsys.readouterr().err
