"""Runs the commands of `tiered-index spark` and `merge --master` in this process.

Programs of this folder run in processes of their own.
"""

import json
import os
import subprocess
import sys
from typing import Any

from tests.integration.cli.command_lines import TOP, Outcome, run_here


def outcome_of(line: str, *more: object, code: int = 0, **environment: str) -> Outcome:
    """Run `tiered-index spark LINE --json --quiet`, which must end with `code`; return its output.

    `merge` gets a master in place of the word spark.
    """
    words = line.split()
    words = [*words, "--master", "local[2]"] if words[0] == "merge" else ["spark", *words]
    outcome = run_here(*words, *more, "--json", "--quiet", environment=environment)
    assert outcome.code == code, outcome
    return outcome


def program_of(name: str, *arguments: object) -> tuple[list[str], dict[str, str]]:
    """Return the command of a program of this folder, and its environment."""
    command = [sys.executable, "-m", f"tests.spark.{name}", *map(str, arguments)]
    return command, {**os.environ, "PYTHONPATH": str(TOP), "SPARK_LOCAL_IP": "127.0.0.1"}


def run_program(name: str, *arguments: object, timeout: float = 900, code: int = 0) -> tuple[list[dict[str, Any]], str]:
    """Run a program of this folder, which must end with `code`; return the lines that it prints, and its log.

    The call waits until Java and the executors have ended, too, since they have the same pipes.
    """
    command, environment = program_of(name, *arguments)
    ended = subprocess.run(command, cwd=TOP, env=environment, capture_output=True, text=True, timeout=timeout)
    assert ended.returncode == code, (ended.stdout, ended.stderr[-3000:])
    return [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")], ended.stderr
