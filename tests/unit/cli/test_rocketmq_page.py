"""docs/rocketmq.md names every state and hash rule.

`tests/server/test_deploy.py` checks the options of its commands.
"""

import re
from pathlib import Path
from typing import get_args, get_type_hints

from tiered_index import IndexConfig
from tiered_index.service.read.messages import MessageState
from tiered_index.service.read.unsealed import SHOWN_EVERY_MS

PAGE = (Path(__file__).parents[3] / "docs" / "rocketmq.md").read_text()
COMMANDS = sorted(set(re.findall(r"(?:^|`)tiered-index ([^`\n]+)", PAGE, re.MULTILINE)))


def test_the_page_has_commands() -> None:
    assert {line.split()[0] for line in COMMANDS} == {"ingest", "query", "message", "serve"}
    assert all(f"`{name} " in PAGE for name in ("queryMsgByKey", "queryMsgById", "queryMsgByUniqueKey"))


def test_every_state_is_explained() -> None:
    for state in MessageState.__args__:  # type: ignore[attr-defined]
        assert f"| `{state}` |" in PAGE


def test_the_page_says_what_the_preset_is_for() -> None:
    """The page names each release's hash rule and the delay of a live file, and warns of a broker's own folders."""
    section = PAGE.split("## The preset `rocketmq`")[1]
    for rule in get_args(get_args(get_type_hints(IndexConfig)["hash"])[0]):
        assert f'`hash = "{rule}"`' in section
    assert f"every {SHOWN_EVERY_MS // 1000} s" in section
    assert "Do not copy these files into the folders of a broker's tiered store" in section
    assert "preset `native`" in section
