"""The demo's two processes: a broker that writes the stream, and `tiered-index ingest --follow`, which is killed.

The broker writes everything up to the tail into a RocketMQ store, prints a line, waits for one and writes the tail.
This module computes each message's place from the lengths alone. One thread uses it.
"""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.demo.workload import TOPICS, Workload
from tests.support.child import Child
from tests.support.processes import started
from tests.support.store_writer import StoreWriter
from tests.support.stored_messages import format_properties, message_size
from tiered_index.cli.ending import Ending
from tiered_index.cli.output import Output
from tiered_index.connectors.rocketmq.log.layout import BLANK_BYTES, KEYS, MAGIC_V1
from tiered_index.errors import ConfigError, TieredIndexError
from tiered_index.format.layout import Layout
from tiered_index.format.names import STATES

_POLL_S = 0.002
# The storage may still execute requests that a stopped process has sent: the length of the wait for them.
_IN_FLIGHT_S = 0.05
_LIMIT_S = 300.0
_HOLD_S = 60.0


class ProcessFailed(TieredIndexError):
    """A process of the demo ended with its own error."""

    exit_code = 1


@dataclass(frozen=True)
class Follower:
    """Starts the process. Its environment is this one's, except for the layout of files."""

    source: Path
    root: Path
    storage_uri: str
    layout: Layout

    def run_until(self, moment: Callable[[], bool], over: Callable[[], bool], *, hold_uploads: bool = False) -> bool:
        """Start it and kill it once `moment` is true; return whether it was killed.

        Before the kill it is stopped, so that its upload can't end meanwhile. With `hold_uploads` no upload ends for a
        minute, so that a busy machine has the time to see one. Once `over` is true, the process ends without a kill.
        """
        with self._started(*self._ingest(), hold_uploads=hold_uploads) as process:
            deadline, terminated = time.monotonic() + _LIMIT_S, False
            while process.poll() is None and time.monotonic() < deadline:
                if moment():
                    process.send_signal(signal.SIGSTOP)
                    time.sleep(_IN_FLIGHT_S)
                    if moment():
                        process.kill()
                        return True
                    process.send_signal(signal.SIGCONT)
                elif not terminated and over():
                    # once: a second signal would kill it while it closes
                    process.terminate()
                    terminated = True
                time.sleep(_POLL_S)
            process.kill()
            _output(process, "ingest")
        return False

    def finish(self, position: int) -> dict[str, Any]:
        """Let it follow the store up to a position and upload everything; return its last status line."""
        last: dict[str, Any] = {}
        with self._started(*self._ingest(), "--wait") as process:
            assert process.stdout is not None
            for line in process.stdout:
                last = json.loads(line)
                if last["status"] == "following" and last["position"] >= position:
                    process.terminate()
            _output(process, "ingest")
        if last.get("status") != "stopped":
            raise ProcessFailed(f"ingest ended by itself: {last}")
        return last

    @property
    def _mark(self) -> Path:
        return self.root.with_name("an upload waits")

    def is_uploading(self) -> bool:
        """Return whether an upload was seen with `hold_uploads`."""
        return self._mark.exists()

    def is_idle(self) -> bool:
        """Return whether no file waits to be compacted or uploaded, except the newest unsealed one."""
        unsealed, compacted = map(self._files, STATES[:2])
        return unsealed <= 1 and not compacted

    def files_begun(self) -> int:
        """Return the number of index files in the root, in any state."""
        return sum(map(self._files, STATES))

    def _files(self, state: str) -> int:
        try:
            return sum(name.endswith(".index") for name in os.listdir(self.root / state))
        except FileNotFoundError:
            return 0

    def recover(self) -> dict[str, Any]:
        """Run `recover`; return its output."""
        with self._started("recover") as process:
            return json.loads(_output(process, "recover"))  # type: ignore[no-any-return]

    def _ingest(self) -> tuple[str, ...]:
        geometry = ("--slots", str(self.layout.slots), "--items", str(self.layout.items))
        return ("ingest", str(self.source), "--follow", *geometry)

    def _started(
        self, *arguments: str, hold_uploads: bool = False
    ) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
        """Start a process of the command line; it is killed at the block's end if it still lives."""
        places = ["--root", str(self.root), "--storage", self.storage_uri, "--json", "--quiet"]
        held = {"HOLD_UPLOADS_S": str(_HOLD_S), "HOLD_UPLOADS_MARK": str(self._mark)}
        command = [sys.executable, "-m", "tests.support.held_uploads", *arguments, *places]
        return started(command, os.environ | (held if hold_uploads else {}))


def _output(process: subprocess.Popen[str], name: str) -> str:
    """Return the rest of the output, once the process has ended. Raises `ProcessFailed`."""
    try:
        output, errors = process.communicate(timeout=_LIMIT_S)
    except subprocess.TimeoutExpired as error:
        raise ProcessFailed(f"{name} did not end within {_LIMIT_S:.0f} s") from error
    if process.returncode:
        raise ProcessFailed(f"{name} ended with exit code {process.returncode}: {errors.strip() or output.strip()}")
    return output


# Smaller than a broker's 1 GiB, so that the demo's log has several segments.
SEGMENT_BYTES = 64 << 20
_BODY_BYTES = 64
_NOTE = "leave it with the neighbours on the left"
_FLUSH_MESSAGES = 5_000
_WAIT_S = 300
_WRITTEN = "written"
_MODULE = "tests.demo.processes"

Array = npt.NDArray[Any]


def placed(workload: Workload, segment_bytes: int = SEGMENT_BYTES) -> Workload:
    """Return the stream with the offset and size that each message will have in the broker's store."""
    starts = np.searchsorted(workload.entry_message, np.arange(len(workload)))
    key_bytes = np.array([len(key) for key in workload.keys])
    counts = np.bincount(workload.entry_message, minlength=len(workload))
    joined = np.add.reduceat(key_bytes[workload.entry_key], starts) + counts - 1
    fixed = np.array(
        [message_size(0, MAGIC_V1, len(topic), 0, len(format_properties({KEYS: "x"})) - 1) for topic in TOPICS]
    )
    size = fixed[workload.topic] + _body_bytes(workload) + joined
    ends = np.cumsum(size)
    offset = np.empty(len(workload), np.int64)
    first, segment = 0, 0
    while first < len(workload):
        before = int(ends[first] - size[first])
        # a message fits into a segment if a blank fits after it
        last = max(first + 1, int(np.searchsorted(ends, before + segment_bytes - BLANK_BYTES, "right")))
        offset[first:last] = segment + ends[first:last] - size[first:last] - before
        first, segment = last, segment + segment_bytes
    return dataclasses.replace(workload, offset=offset, size=size.astype(np.int32))


def _body_bytes(workload: Workload) -> Array:
    return workload.size % _BODY_BYTES


class Broker(Child):
    """The process, which makes the stream of `messages` and `seed` itself."""

    def __init__(self, messages: int, seed: int, tail_start: int, store: Path) -> None:
        (store / "commitlog").mkdir(parents=True, exist_ok=True)
        super().__init__("-m", _MODULE, *map(str, (messages, seed, tail_start, store)), stderr=subprocess.PIPE)

    def wait_written(self) -> None:
        """Return once everything before the tail is written. Raises `ProcessFailed`."""
        if self.line() != _WRITTEN:
            self._failed()

    def write_tail(self) -> None:
        """Let it write the tail, to its end. Raises `ProcessFailed`."""
        self.stdin.close()
        if self.process.wait(_WAIT_S):
            self._failed()

    def _failed(self) -> None:
        self.process.kill()
        self.process.wait()
        assert self.process.stderr is not None
        raise ProcessFailed(
            f"the broker's process ended with exit code {self.process.returncode}: {self.process.stderr.read().strip()}"
        )

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        super().close()


def _body(length: int) -> bytes:
    """Return a JSON text of this many bytes (nothing for 0)."""
    head, tail = ('{"state":"paid","note":"', '"}') if length > 26 else ('"', '"')
    room = length - len(head) - len(tail)
    return (head + _NOTE[:room] + tail if room >= 0 else "1"[:length]).encode()


def _write(messages: int, seed: int, tail_start: int, store: Path) -> None:
    workload = Workload.generate(messages, seed=seed)
    columns = (workload.topic, workload.queue_id, _body_bytes(workload), workload.timestamp_ms)
    ends = np.searchsorted(workload.entry_message, np.arange(1, messages + 1))
    keys = [workload.keys[key] for key in workload.entry_key.tolist()]
    bodies = [_body(length) for length in range(_BODY_BYTES)]
    start = 0
    with StoreWriter(store, segment_bytes=SEGMENT_BYTES) as writer:
        rows = zip(*(column.tolist() for column in (*columns, ends)), strict=True)
        for number, (topic, queue_id, length, store_ms, end) in enumerate(rows):
            if number == tail_start:
                writer.flush()
                sys.stdout.write(_WRITTEN + "\n")
                sys.stdout.flush()
                sys.stdin.read()
            text = " ".join(keys[start:end])
            writer.put(TOPICS[topic], queue_id, bodies[length], keys=text, store_ms=store_ms)
            start = end
            if number % _FLUSH_MESSAGES == 0:
                writer.flush()


if __name__ == "__main__":
    _count, _seed, _tail_start = map(int, sys.argv[1:4])
    _write(_count, _seed, _tail_start, Path(sys.argv[4]))


_LOOKUP = "topic=orders&key=order-0000001"
_LOOK_S = 0.1


@dataclass(frozen=True)
class ServedDemo:
    """The broker and the service in `folder`. The service follows the store. `layout` is the files'."""

    folder: Path
    messages: int
    seed: int
    layout: Layout
    port: int
    rocketmq_port: int

    def run(self, out: Output) -> None:
        """Start both, print their addresses, and return once Ctrl-C or SIGTERM has ended the service.

        Raises `ConfigError` without the extra 'server', and `ProcessFailed` if a process fails.
        """
        try:
            from tiered_index.server.http.tokens import add_token
        except ModuleNotFoundError as error:
            raise ConfigError(f"--serve needs the extra 'server' ({error.name} is missing)") from error
        tokens, store = self.folder / "tokens.json", self.folder / "store"
        token = add_token(tokens, "demo", "admin", None)
        with contextlib.ExitStack() as stack:
            # with an empty tail it writes everything at once
            broker = stack.enter_context(Broker(self.messages, self.seed, self.messages, store))
            ending = stack.enter_context(Ending())
            service = stack.enter_context(self._service(tokens, store))
            self._show_urls(out, service, token)
            while service.poll() is None and not ending.event.wait(_LOOK_S):
                # Ctrl-C also ends the broker, so wait once more before its end counts as a failure
                if broker.process.poll() and not ending.event.wait(_LOOK_S):
                    break
            is_asked = ending.event.is_set()
            service.terminate()
            service.wait()
            if broker.process.poll() and not is_asked:
                # raises
                broker._failed()
        if service.returncode:
            raise ProcessFailed(f"serve ended with exit code {service.returncode}")

    def _service(self, tokens: Path, store: Path) -> subprocess.Popen[str]:
        places = ["--root", f"{self.folder / 'root'}", "--storage", f"file://{self.folder / 'storage'}"]
        writing = ["--follow", f"{store}", "--store-name", "demo", "--archive-segments"]
        guard = ["--tokens", f"{tokens}"]
        ports = ["--port", f"{self.port}", "--rocketmq-port", f"{self.rocketmq_port}"]
        geometry = {"TIERED_INDEX_SLOTS": f"{self.layout.slots}", "TIERED_INDEX_ITEMS": f"{self.layout.items}"}
        return subprocess.Popen(
            [sys.executable, "-m", "tiered_index.cli", "serve", *places, *writing, *guard, *ports, "--json", "--quiet"],
            env={**os.environ, **geometry},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            # Ctrl-C would reach it, too, and the signal that ends it would be its second one
            process_group=0,
        )

    def _show_urls(self, out: Output, service: subprocess.Popen[str], token: str) -> None:
        assert service.stdout is not None
        # the follower also prints its position, before and after
        urls = next((urls for line in service.stdout if (urls := json.loads(line).get("urls"))), None)
        if urls is None:
            return
        threading.Thread(target=service.stdout.read, daemon=True).start()
        url, rocketmq = urls
        address = rocketmq.rpartition("/")[2]
        # the text after # is not sent, and the console removes the token from its address
        console = f"{url}/console/#token={token}&search?{_LOOKUP}"
        document = {"status": "serving", "url": url, "console": console, "rocketmq": address, "token": token}
        out.answer(document, streamed=True)
        out.fields({"console": console, "HTTP": url, "token": token, "RocketMQ's tools": f"name server {address}"})
        out.line(f'curl -H "Authorization: Bearer {token}" "{url}/v1/query?{_LOOKUP}&max_count=3"')
        out.line(f"mqadmin queryMsgByKey -n {address} -t orders -k order-0000001")
        out.flush()
