"""The counts and failures of a campaign. Each campaign returns and prints them, and docs/reliability.md has them."""

import argparse
import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from tiered_index.errors import TieredIndexError


class Hang(BaseException):
    """A call took longer than its bound. It is not an `Exception`, so no handler of the engine catches it."""

    kind = "hangs"


@dataclass
class Tally:
    """The counts and failures of one campaign.

    `tried` has the number of tries of each kind ("crash states", "seeds", "mutations of journal", ...). Each failure is
    a line in `failures`, which ends with the command to replay it. Its kind is one of `KINDS`.
    """

    KINDS = ("lost", "wrong", "untyped", "hangs")

    campaign: str
    command: str = ""
    tried: Counter[str] = field(default_factory=Counter)
    by_kind: Counter[str] = field(default_factory=Counter)  # failures by kind
    failures: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def fail(self, kind: str, what: str) -> None:
        """Count a failure: ``lost`` (a durable entry), ``wrong`` (an answer), ``untyped`` (an error), ``hangs``."""
        assert kind in self.KINDS
        self.by_kind[kind] += 1
        self.failures.append(f"{kind}: {what}")
        print(self.failures[-1], file=sys.stderr, flush=True)

    def fail_by(self, error: BaseException, what: str) -> None:
        """Count an exception as a failure. `what` ends with the command to replay it."""
        kind = getattr(error, "kind", "untyped")
        if isinstance(error, AssertionError) and kind == "untyped":
            is_lost = any(word in str(error) for word in ("are gone", "runs ahead"))
            kind = "lost" if is_lost else "wrong"
        elif isinstance(error, TieredIndexError):
            kind = "lost"
        places = [f"{Path(f.filename).name}:{f.lineno}" for f in traceback.extract_tb(error.__traceback__)][-4:]
        text = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]).replace("\n", " ")
        self.fail(kind, f"{text[:600]} at {' '.join(places)}: {what}")

    def add(self, other: "Tally") -> None:
        """Add the counts and failures of another process."""
        self.tried += other.tried
        self.by_kind += other.by_kind
        self.failures += other.failures


@contextlib.contextmanager
def bounded(seconds: float) -> Iterator[None]:
    """Raise `Hang` in the main thread if the block takes longer. The time of a block around it then begins again.

    In another thread it does nothing: the main thread waits for it, and has its own time.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(number: int, frame: FrameType | None) -> None:
        raise Hang("".join(traceback.format_stack(frame)[-4:]))

    before = signal.signal(signal.SIGALRM, ring)
    # the interval is only a note of the time of the block
    _, around_s = signal.setitimer(signal.ITIMER_REAL, seconds, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, around_s, around_s)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def fast_folder() -> Iterator[Path]:
    """Yield a new folder, in memory if possible."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="tiered-index-", dir=shared, ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def main(
    doc: str, run: Callable[[argparse.Namespace], Tally], add_arguments: Callable[[argparse.ArgumentParser], None]
) -> int:
    """Run a campaign as a program and return its exit code: 1 after a failure.

    It prints failures on stderr, and the tally on stdout (``--json``: one document).
    """
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print the tally as one JSON document")
    add_arguments(parser)
    options = parser.parse_args()
    logging.getLogger("tiered_index").setLevel(logging.CRITICAL)  # the engine logs each injected fault
    began_s = time.monotonic()
    tally = run(options)
    tally.seconds = round(time.monotonic() - began_s, 1)
    arguments = [word for word in sys.argv[1:] if word != "--json"]
    tally.command = " ".join(["python -m", sys.modules["__main__"].__spec__.name, *arguments])
    if options.json:
        print(json.dumps(vars(tally), indent=1))
    else:
        lines = [
            *tally.tried.items(),
            *((kind, tally.by_kind[kind]) for kind in Tally.KINDS),
            ("seconds", tally.seconds),
        ]
        for name, count in lines:
            print(f"{name:40} {count:>12,}")
    return 1 if tally.failures else 0
