"""Runs tests on each golden case."""

import pytest

from tests.golden.naive import CASES, load

MIN_VALUE_CASES = [name for name in CASES if name.startswith("minvalue_")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for fixture, names in (
        ("case", CASES),
        ("min_value_case", MIN_VALUE_CASES),
        ("normal_case", [name for name in CASES if name not in MIN_VALUE_CASES]),
    ):
        if fixture in metafunc.fixturenames:
            metafunc.parametrize(fixture, [load(name) for name in names], ids=names)
