"""Java programs that run beside tests. They end with the tests, also if these are killed."""

import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

_OPTIONS = ("-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xshare:auto")
_ENDS_S = 60.0


def java_command(class_path: str, main: str, *arguments: str, options: Sequence[str] = ()) -> list[str]:
    """Return the command that runs a class."""
    return ["java", *_OPTIONS, *options, "-cp", class_path, main, *arguments]


def run_java(class_path: str, main: str, *arguments: str, options: Sequence[str] = ()) -> str:
    """Run a class to its end; return what it printed. Fails if it fails."""
    command = java_command(class_path, main, *arguments, options=options)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, f"{main} ended with {done.returncode}:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


class JavaProcess:
    """A class that runs in a process of its own, and writes all its lines to the file `log`."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        # setpriv replaces itself by Java, and the kernel kills that when the tests end
        guarded = ["setpriv", "--pdeathsig", "KILL", "--", *command] if shutil.which("setpriv") else command
        self.log = log
        with log.open("wb") as written:
            streams = {"stdin": subprocess.DEVNULL, "stdout": written, "stderr": subprocess.STDOUT}
            self.process = subprocess.Popen(guarded, **streams)

    def wait_for(self, text: str, within_s: float = 120.0) -> None:
        """Wait until it has written a text. Fails if it ends before, or is too slow."""
        until_s = time.monotonic() + within_s
        while text not in (written := self.log.read_text(errors="replace")):
            is_over = self.process.poll() is not None or time.monotonic() > until_s
            assert not is_over, f"no {text!r} (exit code {self.process.returncode}) in:\n{written[-3000:]}"
            time.sleep(0.05)

    def stop(self, number: int = signal.SIGTERM) -> None:
        """Send it a signal, and wait until it has ended."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(_ENDS_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def kill(self) -> None:
        """End it at once."""
        self.stop(signal.SIGKILL)
