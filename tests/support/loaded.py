"""The modules that a process of the command line loads."""

import json
import subprocess
import sys
from collections.abc import Mapping

_SCRIPT = """
import json, sys
from tiered_index.cli.__main__ import run
try:
    run()
finally:
    print(json.dumps(sorted(sys.modules)), file=sys.stderr)
"""


def loaded(*arguments: object, env: Mapping[str, str] | None = None) -> tuple[set[str], str]:
    """Return the names of the modules that `tiered-index` with `arguments` has loaded at its end, and its output."""
    command = [sys.executable, "-c", _SCRIPT, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    return set(json.loads(done.stderr)), done.stdout
