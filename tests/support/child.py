"""A child process that answers lines with lines, and ends with its stdin."""

import contextlib
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Self

_TOP = Path(__file__).parents[2]
_LIMIT_S = 60


class Child:
    """A Python process. `stdin` and `stdout` are its pipes. One thread uses it."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None, stderr: int | None = None) -> None:
        pipe, command = subprocess.PIPE, (sys.executable, *arguments)
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=stderr, text=True, env=env, cwd=_TOP)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout

    def tell(self, line: str) -> None:
        self.stdin.write(line + "\n")
        self.stdin.flush()

    def line(self) -> str:
        """Return the next line that it writes; an empty text if it has ended."""
        return self.stdout.readline().rstrip("\n")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close its stdin, and kill it if it does not end."""
        with contextlib.suppress(BrokenPipeError):
            self.stdin.close()
        try:
            self.process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        for pipe in (self.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
