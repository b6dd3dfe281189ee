"""The README of this folder lists every test of a RocketMQ fault, no other, and agrees with the test."""

from __future__ import annotations

import ast
import re
from pathlib import Path

FOLDER = Path(__file__).parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (FOLDER / "README.md").read_text().splitlines()
    if line.startswith("|") and "rocketmq/" in line
]


def test_the_table_lists_every_file_once_and_no_other() -> None:
    names = []
    for row in ROWS:
        assert len(row) == 4
        match = re.fullmatch(r"\[(test_\w+\.py)\]\(rocketmq/(test_\w+\.py)\)", row[3])
        assert match, row[3]
        assert match[1] == match[2]
        names.append(match[1])
    assert sorted(names) == sorted(
        path.name for path in (FOLDER / "rocketmq").rglob("*.py") if path.name != "conftest.py"
    )


def test_every_golden_fault_has_a_test() -> None:
    assert {int(number) for row in ROWS for number in re.findall(r"\d+", row[2])} == set(range(1, 13))


def test_a_file_names_its_fault_as_the_table_does() -> None:
    for row in ROWS:
        name = re.findall(r"rocketmq/(\w+\.py)", row[3])[0]
        text = ast.get_docstring(ast.parse((FOLDER / "rocketmq" / name).read_text())) or ""
        parts = {line.split(":")[0].split(" #")[0] for line in text.splitlines()}
        assert parts >= {"Fault", "RocketMQ", "Here"}, name
        assert set(re.findall(r"#\d+", text)) == set(re.findall(r"#\d+", row[1])), name
        golden = re.search(r"golden faults? ([\d and,]+)", text)
        assert set(re.findall(r"\d+", golden[1] if golden else "")) == set(re.findall(r"\d+", row[2])), name
