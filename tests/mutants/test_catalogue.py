"""The catalogue fits the code. A defect counts as noticed only if a named test itself fails."""

import builtins
import symtable
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import PACKAGE, Mutant, OutOfDate, Verdict, judge, mutate

TOP = Path(__file__).resolve().parents[2]
NODE = "tests/test_sums.py::test_add"
ADD = Mutant("add", "for a test", "sums.py:add", "a + b", "a - b", (NODE,))
SUMS = "def add(a, b):\n    return a + b\n\n\ndef twice(a):\n    return a * 2\n"


@pytest.fixture(scope="module")
def mutated() -> list[tuple[Mutant, Path, str]]:
    """Each mutant, its file, and the text of the file with the defect; a mutant that is out of date fails."""
    return [(mutant, *mutate(mutant, TOP / PACKAGE)) for mutant in MUTANTS]


def test_each_defect_finds_its_place_and_its_tests(mutated: list[tuple[Mutant, Path, str]]) -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 100
    # classes inherit the tests of every storage
    inherited = (TOP / PACKAGE / "testing/storage_conformance.py").read_text()
    inherited += (TOP / "tests/fencing/scenarios.py").read_text()
    for mutant, _, _ in mutated:
        for test in mutant.tests:
            name, *_, function = test.split("::")
            assert f" {function.split('[')[0]}" in (TOP / name).read_text() + inherited, test


def global_names(table: symtable.SymbolTable) -> Iterator[str]:
    """Yield the global names that the code of a table and of its functions and classes needs."""
    yield from (symbol.get_name() for symbol in table.get_symbols() if symbol.is_global())
    for child in table.get_children():
        yield from global_names(child)


def test_no_defect_needs_a_name_that_is_not_there(mutated: list[tuple[Mutant, Path, str]]) -> None:
    """A `NameError` would make its tests fail, whatever they prove."""
    known = {*dir(builtins), "__file__", "__loader__"}
    for mutant, path, text in mutated:
        of_module = symtable.symtable(text, str(path), "exec")
        assert {*global_names(of_module)} - {*of_module.get_identifiers()} <= known, mutant


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"old": "a / b"}, "0 times"),
        ({"old": "b"}, "2 times"),
        ({"function": "gone"}, "0 functions"),
        ({"new": "a + b"}, "changes nothing"),
        ({"old": "def add(a, b):", "new": "def add(a, b)"}, "no Python"),
    ],
)
def test_a_defect_that_does_not_fit_is_out_of_date(changes: dict[str, str], problem: str, tmp_path: Path) -> None:
    (tmp_path / "sums.py").write_text(SUMS)
    assert mutate(ADD, tmp_path) == (tmp_path / "sums.py", SUMS.replace("a + b", "a - b"))
    with pytest.raises(OutOfDate, match=problem):
        mutate(replace(ADD, **changes), tmp_path)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "output", "verdict"),
    [
        (0, "1 passed", Verdict.GREEN),
        (1, f"FAILED {NODE} - assert 1 == 2", Verdict.RED),
        (1, f"FAILED {NODE}[2]", Verdict.RED),
        (1, f"FAILED {NODE}", Verdict.RED),
        (1, f"FAILED {NODE}itional - assert 1 == 2", Verdict.INVALID),
        (1, f"ERROR {NODE} - assert 1 == 2", Verdict.INVALID),
        *((code, f"FAILED {NODE} - x", Verdict.INVALID) for code in (2, 3, 4, 5, -11)),
    ],
)
def test_a_defect_is_noticed_by_a_named_test_that_fails_by_itself(code: int, output: str, verdict: Verdict) -> None:
    assert judge([NODE], code, output) is verdict
