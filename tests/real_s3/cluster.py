"""The smallest Ceph with an S3 service: one monitor, one OSD on a sparse file, one gateway, on free loopback ports.

It writes only to its state folder, which `init` fills and `remove` deletes. Acknowledged writes are on the disk, so
tests may kill the processes and start them again. A method ends a process only if its command line names this state
folder.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.real_s3.packages import Programs
from tests.support.ports import free_ports

ACCESS_KEY = "real-s3-access-key"
SECRET_KEY = "real-s3-secret-key"
_START_S = 60.0
_TOOL_S = 120.0
_GENTLE_STOP_S = 3.0
_LOOK_S = 0.05
_SHOWN_CHARACTERS = 3000
_FULL = re.compile(r"\b(near|backfill)?full\b")
PROGRAMS = ("ceph-mon", "ceph-osd", "radosgw")


_children: dict[int, subprocess.Popen[bytes]] = {}
# This process started them, and may end before they do. The list keeps them: otherwise each would warn that no process
# waits for it.


@dataclass(frozen=True)
class Ports:
    monitor: int
    gateway: int


class ClusterError(Exception):
    """The cluster did not do a step; the message names the log to read."""


class Cluster:
    """The cluster in the folder `state`, with the programs of `programs`."""

    def __init__(self, programs: Programs, state: Path) -> None:
        self.programs = programs
        self.state = state
        self._children = _children

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self._ports().gateway}"

    def init(self) -> None:
        """Make an empty cluster with one S3 user, and leave it stopped."""
        for name in ("monitor", "osd", "run", "log", "gateway"):
            (self.state / name).mkdir(parents=True)
        (self.state / "keyring").touch()
        ports = Ports(*free_ports(2))
        (self.state / "ports.json").write_text(json.dumps(asdict(ports)))
        cluster_id = str(uuid.uuid4())
        self._config().write_text(_configuration(self.state, self.programs, ports, cluster_id))
        address = f"[v2:127.0.0.1:{ports.monitor}]"
        monmap = str(self.state / "monmap")
        try:
            self._run("monmaptool", "--create", "--clobber", "--fsid", cluster_id, "--addv", "a", address, monmap)
            self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
            self._launch("ceph-mon")
            osd = str(uuid.uuid4())
            self._administer("osd", "new", osd)
            self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
            self._launch("ceph-osd")
            self._make_user()
        finally:
            self.stop()

    def start(self) -> None:
        """Start the processes that do not run; return when the gateway responds."""
        for program in PROGRAMS:
            if self._running(program) is None:
                self._launch(program)
        self._until(self._answers, "the gateway did not answer")

    def stop(self) -> None:
        """Stop the processes by a signal, and kill them if they hang: the gateway may hang while it shuts down."""
        for program in reversed(PROGRAMS):
            self._end(program, signal.SIGTERM)

    def kill(self, programs: Sequence[str] = PROGRAMS) -> None:
        """Kill every process at once, as nearly as possible like a power cut; or kill some of `PROGRAMS`."""
        for program in programs:
            self._end(program, signal.SIGKILL)

    def send(self, program: str, number: signal.Signals) -> None:
        """Stop or continue one of `PROGRAMS`, if it runs."""
        process_id = self._running(program)
        if process_id is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, number)

    def fill(self) -> None:
        """Make the disk count as full. Some seconds later the server refuses every write with InsufficientCapacity."""
        for which, ratio in (("nearfull", 0.00001), ("backfillfull", 0.00002), ("full", 0.00003)):
            self._administer("osd", f"set-{which}-ratio", f"{ratio:f}")

    def make_room(self) -> None:
        """Undo `fill`; return when the cluster knows. An OSD that is killed before would count as full for good."""
        for which, ratio in (("full", 0.95), ("backfillfull", 0.90), ("nearfull", 0.85)):
            self._administer("osd", f"set-{which}-ratio", f"{ratio:f}")
        self._until(lambda: not _FULL.search(self._administer("osd", "dump")), "the disk still counts as full")

    def set_quota(self, *, enabled: bool) -> None:
        """Limit the user to its present number of objects, or remove the limit. The server refuses further objects with
        QuotaExceeded.
        """
        for words in (("set", "--max-objects=1"), ("enable",)) if enabled else (("disable",),):
            self._admin("quota", words[0], "--quota-scope=user", *words[1:])

    def remove(self) -> None:
        """Stop all processes and delete the state."""
        if self.state.exists():
            self.stop()
            shutil.rmtree(self.state)

    def _make_user(self) -> None:
        keys = (f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        self._admin("user", "create", "--display-name=tests", *keys)

    def _admin(self, *words: str) -> None:
        self._run("radosgw-admin", "-n", "client.rgw.a", *words, "--uid=tests")

    def _run(self, program: str, *arguments: str) -> None:
        self._finish(program, self.programs.command(program, "-c", str(self._config()), *arguments), {})

    def _administer(self, *arguments: str) -> str:
        timeout = ("--connect-timeout", str(int(_START_S)))
        command, environment = self.programs.python_command("ceph", "-c", str(self._config()), *timeout, *arguments)
        return self._finish("ceph", command, environment)

    def _finish(self, program: str, command: list[str], environment: Mapping[str, str]) -> str:
        # The programs have timeouts for processes that do not respond. This bound covers all other waits.
        try:
            started = {"env": self._environment(environment), "stdin": subprocess.DEVNULL, "timeout": _TOOL_S}
            done = subprocess.run(command, capture_output=True, text=True, check=False, **started)
        except subprocess.TimeoutExpired as error:
            raise ClusterError(f"{program} did not end within {_TOOL_S:.0f} s; see {self.state / 'log'}") from error
        with self._log(program).open("a") as log:
            log.write(done.stdout + done.stderr)
        if done.returncode:
            log_end = done.stderr[-_SHOWN_CHARACTERS:]
            raise ClusterError(f"{program} ended with {done.returncode}; see {self._log(program)}\n{log_end}")
        return done.stdout

    def _launch(self, program: str) -> None:
        identity = {"ceph-mon": ("-i", "a"), "ceph-osd": ("-i", "0"), "radosgw": ("-n", "client.rgw.a")}[program]
        command = self.programs.command(program, "-f", "-c", str(self._config()), *identity)
        with self._log(program).open("a") as log:
            # a separate session: an interrupt typed at a test run must not reach it before the run has cleaned up
            pipes = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            process = subprocess.Popen(command, env=self._environment({}), start_new_session=True, **pipes)
        self._children[process.pid] = process
        (self.state / "run" / f"{program}.pid").write_text(str(process.pid))

    def _environment(self, more: Mapping[str, str]) -> dict[str, str]:
        modules = {"CEPH_CONF": str(self._config()), "OPENSSL_MODULES": str(self.programs.libraries / "ossl-modules")}
        return {"PATH": os.environ.get("PATH", ""), "HOME": str(self.state), "LC_ALL": "C", **modules, **more}

    def _running(self, program: str) -> int | None:
        """Return the process's id if it lives and is ours; the system may give an old id to another process."""
        try:
            process_id = int((self.state / "run" / f"{program}.pid").read_text())
            child = self._children.get(process_id)
            if child is not None:
                return process_id if child.poll() is None else None  # a new process has no command line yet
            command = Path(f"/proc/{process_id}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError, ValueError):
            return None
        return process_id if str(self._config()).encode() in command else None

    def _end(self, program: str, signal_number: signal.Signals) -> None:
        process_id = self._running(program)
        if process_id is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process_id, signal_number)
            if not _wait_for(lambda: self._gone(process_id), _GENTLE_STOP_S):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process_id, signal.SIGKILL)
                self._until(lambda: self._gone(process_id), f"{program} could not be killed")
        (self.state / "run" / f"{program}.pid").unlink(missing_ok=True)

    def _gone(self, process_id: int) -> bool:
        """Return whether a process has ended.

        It frees its memory first and its file locks last, and the next start needs those.
        """
        child = self._children.get(process_id)
        if child is not None:
            return child.poll() is not None
        try:
            state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        return state in "ZX"  # a zombie: it ended, and its parent has not waited for it yet

    def _answers(self) -> bool:
        for program in PROGRAMS:
            if self._running(program) is None:
                log_end = self._log(program).read_text()[-_SHOWN_CHARACTERS:]
                raise ClusterError(f"{program} ended; see {self._log(program)}\n{log_end}")
        try:
            with urllib.request.urlopen(self.endpoint_url, timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def _until(self, condition: Callable[[], bool], otherwise: str) -> None:
        if not _wait_for(condition, _START_S):
            raise ClusterError(f"{otherwise} within {_START_S:.0f} s; see {self.state / 'log'}")

    def _ports(self) -> Ports:
        return Ports(**json.loads((self.state / "ports.json").read_text()))

    def _config(self) -> Path:
        return self.state / "ceph.conf"

    def _log(self, program: str) -> Path:
        return self.state / "log" / f"{program}.out"


def _wait_for(condition: Callable[[], bool], bound_s: float) -> bool:
    deadline_s = time.monotonic() + bound_s
    while not condition():
        if time.monotonic() >= deadline_s:
            return False
        time.sleep(_LOOK_S)
    return True


def _configuration(state: Path, programs: Programs, ports: Ports, cluster_id: str) -> str:
    plugins = programs.libraries
    sections: dict[str, dict[str, object]] = {
        "global": {
            "fsid": cluster_id,
            "mon host": f"v2:127.0.0.1:{ports.monitor}",
            "public addr": "127.0.0.1",
            "ms bind ipv6": "false",
            # only this machine's processes reach a loopback port, and keys would slow the start
            **{f"auth {who} required": "none" for who in ("cluster", "service", "client")},
            "auth allow insecure global id reclaim": "true",
            "mon warn on insecure global id reclaim": "false",
            # without authentication, the default encrypted mode never connects
            **{f"ms {by}{who} mode": "crc" for by in ("", "mon ") for who in ("cluster", "service", "client")},
            # one copy on one disk
            "osd pool default size": 1,
            "osd pool default min size": 1,
            "mon allow pool size one": "true",
            "osd crush chooseleaf type": 0,
            "osd pool default pg num": 8,
            "osd pool default pgp num": 8,
            "osd pool default pg autoscale mode": "off",
            "mon max pg per osd": 2000,
            # a developer's disk is often nearly full
            "mon data avail warn": 2,
            "mon data avail crit": 1,
            "run dir": state / "run",
            "admin socket": f"{state}/run/$name.asok",
            "pid file": f"{state}/run/$name.own-pid",
            "log file": f"{state}/log/$name.log",
            "debug rgw": 0,
            "keyring": state / "keyring",
            "plugin dir": plugins / "ceph",
            "erasure code dir": plugins / "ceph" / "erasure-code",
            "osd erasure code plugins": "",
            "osd class dir": plugins / "rados-classes",
            "compressor plugin dir": plugins / "ceph" / "compressor",
            "crypto plugin dir": plugins / "ceph" / "crypto",
        },
        "mon.a": {"mon data": state / "monitor", "mon osd down out interval": 0},
        "osd.0": {
            "osd data": state / "osd",
            "osd objectstore": "bluestore",
            "bluestore block create": "true",
            "bluestore block size": 10 << 30,
            "bluestore fsck on mount": "false",
            "osd memory target": 896 << 20,
            "osd op num shards": 2,
            "osd mclock skip benchmark": "true",
        },
        "client.rgw.a": {
            "rgw data": state / "gateway",
            # without tcp_nodelay, every small response waits 40 ms for an acknowledgement
            "rgw frontends": f"beast endpoint=127.0.0.1:{ports.gateway} tcp_nodelay=1",
            "rgw thread pool size": 64,
            "rgw enable usage log": "false",
            "rgw enable ops log": "false",
            "rgw gc obj min wait": 30,
        },
    }
    blocks = (
        "\n".join((f"[{name}]", *(f"{key} = {value}" for key, value in settings.items())))
        for name, settings in sections.items()
    )
    return "\n".join(blocks) + "\n"
