"""The console script in a separate process, which tests stop and kill at chosen moments."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes import started

TIMEOUT_S = 120
# files of 8.8 MB have two parts; packed ones of so few items have one
SLOTS, ITEMS = 400_000, 200_001


def ingest_command(source: Path, root: Path, uri: str) -> list[str]:
    return [
        *(sys.executable, "-m", "tiered_index", "ingest", str(source), "--preset", "rocketmq"),
        *("--root", str(root), "--storage", uri, "--wait", "--json", "--quiet"),
        *("--slots", str(SLOTS), "--items", str(ITEMS), "--patience", "20"),
    ]


def settings(**more: str) -> dict[str, str]:
    """Return the environment: no pauses, no local copies, and the client's credentials."""
    chosen = {"LOCAL_KEEP_S": "0", "LIFECYCLE_INTERVAL_S": "0.1", "FLUSH_INTERVAL_S": "0.1", **more}
    return {**os.environ, **{f"TIERED_INDEX_{name}": value for name, value in chosen.items()}}


def finished(command: list[str], environment: Mapping[str, str] | None = None) -> str:
    """Run `command`, which must succeed; return its output."""
    with started(command, environment or settings()) as process:
        out, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, err
    return out
