"""What every command has to load before it begins."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("pandas", "boto3", "pyspark", "pyarrow.dataset", "fastapi")


def test_the_command_line_loads_nothing_that_few_commands_need():
    script = f"import sys, tiered_index.cli.main; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
