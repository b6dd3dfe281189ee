"""The chaos campaign: processes write, read, merge and erase on a real S3 server while everything fails.

    python -m tests.reliability.chaos --minutes 10 [--seed S]

Two writers of one index take over from each other. Four timelines of events run in parallel. The seed decides their
events:

- the processes: SIGKILL, SIGSTOP and SIGTERM
- the server: it or a part of it is killed, stopped or restarted, its disk is full, or its quota is used up
- the network of each of the two hosts: a proxy disturbs requests

The campaign prints each event with its time on stderr. At the end all faults are over, and all entries must be found
(`chaos_settling`). Without TIERED_INDEX_TEST_S3_ENDPOINT the campaign starts a server of its own, and kills only that
one.

Threads: the main thread starts and ends processes. Each of the other timelines has a thread.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import boto3
from botocore.config import Config

from tests.real_s3.cluster import Cluster, ClusterError
from tests.real_s3.packages import install
from tests.real_s3.server import ENDPOINT_VARIABLE, STATE_VARIABLE
from tests.reliability.chaos_crew import HANG_S, LEASE_TTL_S, Place
from tests.reliability.chaos_settling import settle
from tests.reliability.tally import Tally
from tests.reliability.tally import main as tally_main
from tests.storage.scripted_server import error as s3_error
from tests.support.counting_proxy import Action, CountingProxy, Request, counting_proxy
from tests.support.processes import without_settings
from tiered_index.errors import TieredIndexError
from tiered_index.storage.opening import open_storage

CREW = {"writer-a": 0, "writer-b": 1, "reader-stored": 0, "reader-local": 1, "merger": 1, "eraser": 0}
"""The processes of the campaign, and the host of each."""
_LOOK_S = 0.05
_PATIENCE_S = 60.0
_TRIES = 5
_SERVER = (
    *("kill all", "kill all", "restart", "kill the gateway", "kill the disk's process"),
    *("stop the gateway", "stop the disk's process", "fill the disk", "use up the quota"),
)
_NETWORK = (
    *("latency", "resets", "responses cut short", "lost requests", "lost responses"),
    *("503", "no response", "no response after the work", "slow responses"),
)
Timeline = Generator[float, None, None]
"""Yields the seconds to wait before the next event. When it is closed, it ends its faults."""


@dataclass
class _Member:
    process: subprocess.Popen[bytes] | None = None
    due_s: float = 0.0
    """The time of its next start."""
    signalled: bool = False
    """Whether a signal of the campaign may have ended it."""
    wakes_s: float | None = None
    """The time at which a stopped process continues."""


class Campaign:
    """One run of the campaign. It counts in `tally`."""

    def __init__(self, seconds: float, seed: int, endpoint_url: str, cluster: Cluster | None, folder: Path) -> None:
        self.seconds, self.seed, self.folder = seconds, seed, folder
        self.endpoint_url, self.cluster = endpoint_url, cluster
        self.tally = Tally("chaos")
        self.bucket = f"tiered-index-chaos-{uuid.uuid4().hex[:12]}"
        self.proxies: list[CountingProxy] = []
        self.begun = Counter[int]()
        """Number of requests to each proxy."""
        self.crew = {name: _Member() for name in CREW}
        self.starts = 0
        self.ending = threading.Event()
        self._began_s = time.monotonic()
        self._tally_lock = threading.Lock()

    # The run

    def run(self) -> None:
        """Run the campaign. At its end no process of the crew is left, also after an error."""
        client = boto3.client("s3", endpoint_url=self.endpoint_url, config=Config(s3={"addressing_style": "path"}))
        client.create_bucket(Bucket=self.bucket)
        try:
            with contextlib.ExitStack() as hosts:
                self.proxies = [hosts.enter_context(counting_proxy(self.endpoint_url)) for _ in range(2)]
                for host in range(2):
                    self._set_fault(host, None)
                self._strike()
                self.note("all faults are over; all processes end, then the index is checked")
                self._end_crew()
                self._read_notes()
                self._wait_idle()
                try:
                    settle(self.folder, self.uri(), self.count, self.fail)
                except (TieredIndexError, AssertionError) as error:
                    self.fail("wrong", f"settling: {type(error).__name__}: {error}")
        finally:
            self._kill_crew()
            if self.cluster is None:
                with contextlib.suppress(Exception), open_storage(self.uri()) as storage:
                    storage.delete_many([info.name for info in storage.list()])
                    client.delete_bucket(Bucket=self.bucket)
            client.close()

    def note(self, what: str) -> None:
        """Print an event with its time."""
        print(f"{time.monotonic() - self._began_s:7.1f} s  {what}", file=sys.stderr, flush=True)

    def count(self, what: str, number: int = 1) -> None:
        """Add to a count of the tally."""
        with self._tally_lock:
            self.tally.tried[what] += number

    def fail(self, kind: str, what: str) -> None:
        """Add a failure to the tally, and print it."""
        with self._tally_lock:
            self.tally.fail(kind, f"{what} (--seed {self.seed})")
        self.note(f"FAILED: {kind}: {what}")

    def uri(self, host: int | None = None) -> str:
        """Return the URI of the index for a host; None: without a proxy."""
        endpoint_url = self.endpoint_url if host is None else self.proxies[host].endpoint_url
        return f"s3://{self.bucket}/chaos?endpoint_url={endpoint_url}"

    def _strike(self) -> None:
        """Run all timelines for the campaign's time."""
        beside = [self._network(host, self._random(f"network {host}")) for host in range(2)]
        if self.cluster is not None:
            beside.append(self._server(self.cluster, self._random("server")))
        troubles: list[BaseException] = []
        threads = [threading.Thread(target=self._follow, args=(timeline, troubles)) for timeline in beside]
        for thread in threads:
            thread.start()
        try:
            self._tend_until(time.monotonic() + 3.0)  # all members start first
            with contextlib.closing(self._processes(self._random("processes"))) as timeline:
                for pause_s in timeline:
                    until_s = time.monotonic() + pause_s
                    self._tend_until(min(until_s, self._began_s + self.seconds))
                    if time.monotonic() >= self._began_s + self.seconds or troubles:
                        break
        finally:
            self.ending.set()
            for thread in threads:
                thread.join()
        if troubles:
            raise troubles[0]

    def _random(self, name: str) -> random.Random:
        return random.Random(f"{self.seed} {name}")

    def _follow(self, timeline: Timeline, troubles: list[BaseException]) -> None:
        try:
            for pause_s in timeline:
                if self.ending.wait(pause_s):
                    break
            timeline.close()
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            troubles.append(error)

    # Processes

    def _processes(self, chance: random.Random) -> Timeline:
        while True:
            yield chance.uniform(0.2, 5)
            what = chance.choices(("kill", "stop", "end", "kill both writers"), (8, 8, 2, 1))[0]
            both = ("writer-a", "writer-b")
            names = both if what == "kill both writers" else (chance.choice((*CREW, *both)),)
            pause_s = chance.choice((0.0, 0.5, 3.0, LEASE_TTL_S + 2))
            asleep_s = chance.choice((0.2, 1.0, 3.0, LEASE_TTL_S + 1, LEASE_TTL_S + 5))
            for name in names:
                if what.startswith("kill"):
                    self._kill(name, pause_s)
                elif what == "end" and self._signal(name, signal.SIGTERM):
                    self.count("ends (SIGTERM)")
                    self.crew[name].due_s = time.monotonic() + pause_s
                elif what == "stop" and self._signal(name, signal.SIGSTOP):
                    self.note(f"stop {name} for {asleep_s:.1f} s")
                    self.count("stops (SIGSTOP)")
                    self.crew[name].wakes_s = time.monotonic() + asleep_s

    def _kill(self, name: str, pause_s: float) -> None:
        if self._signal(name, signal.SIGKILL):
            self.note(f"kill {name}; it comes back in {pause_s:.1f} s or more")
            self.count("kills (SIGKILL)")
            self.crew[name].due_s = time.monotonic() + pause_s

    def _signal(self, name: str, number: signal.Signals) -> bool:
        process = self.crew[name].process
        if process is None or process.poll() is not None:
            return False
        if number in (signal.SIGKILL, signal.SIGTERM):
            self.crew[name].signalled = True
        process.send_signal(number)
        return True

    def _tend_until(self, until_s: float) -> None:
        """Start and continue members at their times, and check the exit codes of others, until a time."""
        while True:
            for name, member in self.crew.items():
                self._reap(name)
                if member.wakes_s is not None and time.monotonic() >= member.wakes_s:
                    member.wakes_s = None
                    self._signal(name, signal.SIGCONT)
                if member.process is None and time.monotonic() >= member.due_s:
                    self._start(name)
            if time.monotonic() >= until_s:
                return
            time.sleep(_LOOK_S)

    def _start(self, name: str) -> None:
        self.starts += 1
        seed = self._random(f"{name} {self.starts}").randrange(1 << 30)
        place = json.dumps(asdict(Place(str(self.folder), self.uri(CREW[name]), name, seed)))
        role, crew = name.partition("-")[0], "tests.reliability.chaos_crew"
        command = [sys.executable, "-m", crew, role, str(os.getpid()), place]
        with self._stderr(name).open("ab") as log:
            # in its own session, so that an interrupt from the keyboard reaches only the campaign
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(command, env=without_settings(), start_new_session=True, **pipes)
        self.crew[name].process, self.crew[name].signalled = process, False

    def _reap(self, name: str) -> None:
        member = self.crew[name]
        if member.process is not None and (code := member.process.poll()) is not None:
            member.process = None
            if code and not (member.signalled and code in (-signal.SIGKILL, -signal.SIGTERM)):
                kind = "hangs" if "Timeout (" in self._stderr(name).read_text()[-20_000:] else "untyped"
                self.fail(kind, f"{name} ended with {code}; see {self._stderr(name)}")

    def _stderr(self, name: str) -> Path:
        return self.folder / f"stderr-{name}"

    def _end_crew(self) -> None:
        """End members by SIGTERM, and wait for them."""
        for name in CREW:
            self._signal(name, signal.SIGCONT)
            self._signal(name, signal.SIGTERM)
        deadline_s = time.monotonic() + HANG_S
        for name in CREW:
            process = self.crew[name].process
            if process is not None:
                try:
                    process.wait(max(0.1, deadline_s - time.monotonic()))
                except subprocess.TimeoutExpired:
                    self.fail("hangs", f"{name} did not end within {HANG_S:.0f} s; see {self._stderr(name)}")
                    self._signal(name, signal.SIGKILL)
                    process.wait()
            self._reap(name)

    def _kill_crew(self) -> None:
        for member in self.crew.values():
            if member.process is not None:
                member.process.kill()
                member.process.wait()

    # The server

    def _server(self, cluster: Cluster, chance: random.Random) -> Timeline:
        while True:
            yield chance.uniform(2, 12)
            what, lasts_s, down_s = chance.choice(_SERVER), chance.uniform(2, 9), chance.choice((0.0, 0.0, 2.0, 5.0))
            self.note(f"server: {what}")
            self.count(f"server: {what}")
            gateway, disk = "radosgw", "ceph-osd"
            heal: Callable[[], None] = cluster.start
            try:
                if what == "kill all":
                    cluster.kill()
                    yield down_s
                elif what == "restart":
                    cluster.stop()
                elif what.startswith("kill"):
                    cluster.kill((gateway if "gateway" in what else disk,))
                    yield down_s
                elif what.startswith("stop"):
                    cluster.send(gateway if "gateway" in what else disk, signal.SIGSTOP)
                    yield lasts_s
                elif what == "fill the disk":
                    heal = cluster.make_room
                    cluster.fill()
                    yield lasts_s
                else:
                    heal = partial(cluster.set_quota, enabled=False)
                    cluster.set_quota(enabled=True)
                    yield lasts_s
            except ClusterError as error:
                self.note(f"server: that event failed: {error}")
            finally:
                for program in (gateway, disk):
                    cluster.send(program, signal.SIGCONT)
                self._make_well(cluster, heal)
                self.note(f"server: runs again after: {what}")

    def _make_well(self, cluster: Cluster, heal: Callable[[], None]) -> None:
        """Start the stopped parts and end the fault. On a busy machine the server may need several tries."""
        for left in reversed(range(_TRIES)):
            try:
                cluster.start()
                heal()
                return
            except ClusterError as error:
                if not left:
                    raise
                self.note(f"server: try again: {error}")
                cluster.kill()

    # The network

    def _network(self, host: int, chance: random.Random) -> Timeline:
        faults = self._random(f"faults {host}")  # the number of draws depends on the requests
        while True:
            yield chance.uniform(0.5, 8)
            what, share, lasts_s = chance.choice(_NETWORK), chance.choice((0.05, 0.3, 1.0)), chance.uniform(0.5, 7)
            self.note(f"host {host}: {what} for {lasts_s:.1f} s, {share:.0%} of requests")
            self.count(f"network: {what}")
            over = threading.Event()
            make = _fault(what, faults, over)
            self._set_fault(host, lambda make=make, share=share: make() if faults.random() < share else None)  # type: ignore[misc]
            try:
                yield lasts_s
            finally:
                self._set_fault(host, None)
                over.set()

    def _set_fault(self, host: int, make: Callable[[], Action | None] | None) -> None:
        def fault(_: Request) -> Action | None:
            self.begun[host] += 1
            action = make() if make is not None else None
            if action is not None:
                self.count("disturbed requests")
            return action

        self.proxies[host].fault = fault

    def _wait_idle(self) -> None:
        """Wait until the server has answered all requests. A later write would look like one of another process."""
        deadline_s = time.monotonic() + _PATIENCE_S + 5
        while any(self.begun[host] != len(proxy.exchanges) for host, proxy in enumerate(self.proxies)):
            if time.monotonic() > deadline_s:
                return
            time.sleep(0.2)

    # The end

    def _read_notes(self) -> None:
        for name in CREW:
            path = self.folder / f"notes-{name}"
            for line in path.read_text().splitlines() if path.exists() else ():
                note = json.loads(line)
                if "fail" in note:
                    self.fail(note["fail"], note["what"])
                else:
                    self.count(note["count"], note["number"])
            stderr = self._stderr(name).read_text() if self._stderr(name).exists() else ""
            if "Traceback (most recent call last)" in stderr:
                self.fail("untyped", f"{name}: {stderr[stderr.index('Traceback') :][:3000]}")


def _fault(what: str, chance: random.Random, over: threading.Event) -> Callable[[], Action]:
    """Return a function that makes the actions of a fault. `over` is set when the fault ends."""
    nothing = s3_error(503, "Lost")
    return {
        "latency": lambda: Action(hold=lambda delay_s=chance.uniform(0.05, 2): over.wait(delay_s)),  # type: ignore[misc]
        "resets": lambda: Action(cut_at=0, reset=True),
        "responses cut short": lambda: Action(cut_at=chance.choice((1, 20, 100, 3000))),
        "lost requests": lambda: Action(answer=nothing, lose_answer=True),
        "lost responses": lambda: Action(lose_answer=True),
        "503": lambda: Action(answer=s3_error(503, "SlowDown")),
        "no response": lambda: Action(answer=nothing, hold=over.wait, lose_answer=True),
        "no response after the work": lambda: Action(hold=over.wait, lose_answer=True),
        "slow responses": lambda: Action(drip_s=chance.uniform(0.5, 5)),
    }[what]


def run(options: argparse.Namespace) -> Tally:
    """Run a campaign on the endpoint."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    state = os.environ.get(STATE_VARIABLE)
    cluster = Cluster(install(), Path(state)) if state else None
    folder = tempfile.mkdtemp(prefix="tiered-index-chaos-")
    print(f"seed {options.seed}, {options.minutes} minutes, files in {folder}", file=sys.stderr, flush=True)
    campaign = Campaign(options.minutes * 60, options.seed, os.environ[ENDPOINT_VARIABLE], cluster, Path(folder))
    campaign.run()
    campaign.tally.tried = Counter(dict(sorted(campaign.tally.tried.items())))
    if not campaign.tally.failures:
        shutil.rmtree(folder)
    return campaign.tally


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell lets background programs ignore it
    if not os.environ.get(ENDPOINT_VARIABLE) and not {"-h", "--help"} & {*sys.argv[1:]}:
        again = [sys.executable, "-m", "tests.reliability.chaos", *sys.argv[1:]]
        os.execv(sys.executable, [sys.executable, "-m", "tests.real_s3.server", "run", "--", *again])
    sys.exit(tally_main(__doc__ or "", run, add_arguments))
