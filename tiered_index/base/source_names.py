"""The systems whose messages an index can follow, by the names of their positions and logs. Pure.

Only a source of such a system sets a position with such a name. The name of a log of one queue has its topic and its
number (`format/names.py`).
"""

from __future__ import annotations

import re

SYSTEM_NAME = "(?:(?:rocketmq|kafka|files)(?:-[a-z]+)*|rows|points):"
"""A regular expression of how positions and logs of these systems begin."""
_LOGS = {"kafka:": "records of Kafka", "files:": "rows of files", "rows:": "rows of files"}
_LOG = re.compile("|".join(_LOGS))


def messages_of_log(name: str) -> str | None:
    """Return what a log has whose offsets its source gave, by the name of its store or position; None: it is none."""
    log = _LOG.match(name)
    return None if log is None else _LOGS[log[0]]
