"""The programs of pages, by page and section. Each test runs those of its sections."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def section(page: str, name: str) -> str:
    """Return the text of a section, up to the next heading of its level or a higher one."""
    inside, level, lines = False, 0, []
    for line in (DOCS / page).read_text().splitlines(keepends=True):
        inside ^= line.startswith("```")
        marks = 0 if inside else len(line) - len(line.lstrip("#"))
        if level and 0 < marks <= level:
            break
        if level:
            lines.append(line)
        elif marks and line[marks:].strip() == name:
            level = marks
    assert level, f"{page} has no section {name!r}"
    return "".join(lines)


def programs(text: str) -> list[str]:
    """Return the programs of a page or section."""
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
