"""Runs command lines for tests: in this process by the program's own entry, or as the installed script in a separate
process.

A start of the interpreter with all imports takes a second, so `run_here` is the usual way. A separate process is only
for signals, locks between processes, and the installed script itself.
"""

import contextlib
import functools
import io
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn
from unittest import mock

import typer

from tiered_index.cli.main import LateCommand, run

TOP = Path(__file__).resolve().parents[3]
SCRIPT = Path(sys.executable).with_name("tiered-index")
# one parser per process for each command, as in a real process
_PARSERS = {
    (typer.main, "get_command"): functools.cache(typer.main.get_command),
    (LateCommand, "loaded"): functools.cache(LateCommand.loaded),
}
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)


@dataclass(frozen=True)
class Outcome:
    """One run: exit code and both streams."""

    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        """The JSON document on stdout; fails if stdout has anything else."""
        return json.loads(self.out)

    @property
    def records(self) -> list[Any]:
        """The NDJSON on stdout."""
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def error(self) -> Any:
        """The error document on stderr."""
        return json.loads(self.err.splitlines()[-1])["error"]


def clean_environment(**more: str) -> dict[str, str]:
    """Return the environment without settings of this project and of AWS, and with `more`."""
    return {name: value for name, value in os.environ.items() if not name.startswith(("TIERED_INDEX_", "AWS_"))} | more


def run_script(
    *arguments: object, environment: dict[str, str] | None = None, timeout: float = 60, module: str | None = None
) -> Outcome:
    """Run the installed script, or a module of the tests as a program."""
    command = [str(SCRIPT)] if module is None else [sys.executable, "-m", module]
    done = subprocess.run(
        [*command, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env=clean_environment(**(environment or {})),
        stdin=subprocess.DEVNULL,
        cwd=TOP,
        check=False,
    )
    return Outcome(done.returncode, done.stdout, done.stderr)


@contextlib.contextmanager
def running(*arguments: object, **environment: str) -> Iterator[tuple[subprocess.Popen[str], Callable[[], list[Any]]]]:
    """Run the installed script until the block ends; yield the process, and a function of its lines of JSON so far."""
    with (
        tempfile.TemporaryFile("w+") as out,
        subprocess.Popen(
            [str(SCRIPT), *map(str, arguments)],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env=clean_environment(**environment),
        ) as process,
    ):

        def lines() -> list[Any]:
            text = os.pread(out.fileno(), 1 << 24, 0).decode()
            return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]

        try:
            yield process, lines
        finally:
            process.kill()


def run_here(
    *arguments: object,
    environment: dict[str, str] | None = None,
    timeout: float = 60,
    program: Callable[[list[str]], None] = run,
    stdin: bytes = b"",
) -> Outcome:
    """Run a command line in this process as the script (or another program) does, with its own streams and environment.

    Afterwards the process is in its previous state.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2))
    with (
        _put_back(),
        _ended_after(timeout),
        mock.patch.dict(os.environ, clean_environment(**(environment or {})), clear=True),
        tempfile.TemporaryFile() as input_bytes,
        io.TextIOWrapper(input_bytes) as input_text,
        mock.patch.multiple(sys, stdin=input_text, stdout=out, stderr=err),
        contextlib.ExitStack() as patched,
    ):
        for (owner, name), once in _PARSERS.items():
            patched.enter_context(mock.patch.object(owner, name, once))
        input_bytes.write(stdin)
        input_bytes.seek(0)
        try:
            program([str(argument) for argument in arguments])
        except SystemExit as ended:
            code = ended.code
    assert isinstance(code, int)
    return Outcome(code, *(_text(stream) for stream in (out, err)))


def _text(stream: io.TextIOWrapper) -> str:
    stream.seek(0)
    return stream.read()


@contextlib.contextmanager
def _put_back() -> Iterator[None]:
    """Restore the state that dies with a process: the logging, the handlers of signals and the working folder."""
    logger = logging.getLogger("tiered_index")
    logging_before = logger.level, logger.propagate, list(logger.handlers)
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    folder = Path.cwd()
    try:
        yield
    finally:
        level, logger.propagate, logger.handlers[:] = logging_before
        logger.setLevel(level)  # also clears the levels that its children have cached
        if logging.lastResort is not None:
            logging.lastResort.setFormatter(None)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        os.chdir(folder)


class _NeverEnded(BaseException):
    """Not an `Exception`, so that the command doesn't report it as its own error."""


@contextlib.contextmanager
def _ended_after(seconds: float) -> Iterator[None]:
    """Fail a command that does not end in time, as a kill of its process would."""

    def fail(_: int, __: FrameType | None) -> NoReturn:
        raise _NeverEnded(f"after {seconds} s")

    signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
