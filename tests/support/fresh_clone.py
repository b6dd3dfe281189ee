"""Runs the commands of the README as a stranger does: in a clone, each in a virtualenv with only its own extras.

    python -m tests.support.fresh_clone [TRIAL ...]

It needs the standard library alone. The clone has the last commit of this folder, and pip's cache is the usual one. Two
trials run side by side. Without a name all of them run.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

TOP = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
# a compiler that does not optimize: the trials are about what is installed
_FAST = {"CFLAGS": "-O0"}
# a busy machine takes ten times as long
_LIMIT_S = 1800


class Failed(Exception):
    """A command of a trial has failed."""


def blocks(page: str, kind: str) -> list[str]:
    """Return the blocks of a page that are marked as a kind."""
    return [body for name, body in _BLOCK.findall((TOP / page).read_text()) if name == kind]


def commands(block: str) -> str:
    """Return the commands of a block of a console, without their output, as a script."""
    lines, inside = [], False
    for line in block.splitlines():
        if inside or line.startswith("$ "):
            lines.append(line if inside else line[2:])
            inside = line != "END" if inside else "<<'END'" in line
    return "\n".join(lines) + "\n"


def installing() -> str:
    """Return the commands with which the README makes a virtualenv and installs the package."""
    (block,) = [block for block in blocks("README.md", "") if "pip install" in block]
    lines = [line.partition(" #")[0].strip() for line in block.splitlines()]
    return "\n".join(line for line in lines if line.startswith(("python3 -m venv", "pip install"))) + "\n"


def made() -> dict[str, str]:
    """Return the value of DEMO in each `make demo` of the README, with options for few messages."""
    named = re.findall(r"make demo(?: DEMO=(\w+))?", (TOP / "README.md").read_text() + (TOP / "Makefile").read_text())
    few = {
        "demo": "--messages 20000",
        "kafka": "--records 10000",
        "serve": "--messages 20000 --port 0 --rocketmq-port 0",
    }
    return {name: few[name] for name in sorted({name or "demo" for name in named} | {"serve"})}


def run(clone: Path, script: str, **more: str) -> str:
    """Run a script of bash in a folder, with `more` variables, and return its output. Raises `Failed`."""
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV", "MAKE"))
    }
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=clone,
        env=environment | _FAST | more,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_LIMIT_S,
        check=False,
    )
    if done.returncode:
        raise Failed(f"{script}\nended with {done.returncode}:\n{done.stdout[-8000:]}")
    return done.stdout


def try_install(clone: Path) -> None:
    """Install the package, and run the first example of the README and its program."""
    (example, *_), (program, *_) = blocks("README.md", "console"), blocks("README.md", "python")
    run(clone, installing())
    activate, folder = f". {clone}/venv/bin/activate\n", clone.parent / "example"
    folder.mkdir()
    shown = run(folder, activate + commands(example))
    if "2 found (2 local), complete" not in shown:
        raise Failed(f"the first example of the README printed:\n{shown}")
    run(folder, f"{activate}python -c {shlex.quote(program)}")


def try_demo(clone: Path, demo: str) -> None:
    """Run a demo that ends by itself; with few messages."""
    shown = run(clone, f"make demo DEMO={demo} VENV={clone}/.venv-{demo} DEMO_ARGS='{made()[demo]}'")
    if "all right" not in shown:
        raise Failed(f"make demo DEMO={demo} printed:\n{shown}")


def try_serve(clone: Path) -> None:
    """Run the demo that serves, ask it by the command that it prints, and end it by Ctrl-C."""
    command = f"exec make demo DEMO=serve VENV={clone}/.venv-serve DEMO_ARGS='{made()['serve']}'"
    run(clone, f"make VENV={clone}/.venv-serve {clone}/.venv-serve/.stamp-serve")
    serving = subprocess.Popen(
        ["bash", "-c", command],
        cwd=clone,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert serving.stdout is not None
    try:
        curl = next((line for line in serving.stdout if line.lstrip().startswith("curl ")), None)
        if curl is None:
            raise Failed("make demo DEMO=serve printed no command that asks the service")
        until_s = time.monotonic() + 60
        # the command asks for three messages, and the key has more once the store was read
        while (shown := run(clone, f"curl -sS --max-time 20 {curl.strip()[5:]}")).count('"topic":"orders"') < 3:
            if time.monotonic() > until_s:
                raise Failed(f"{curl} printed {shown}")
            time.sleep(0.5)
    finally:
        os.killpg(serving.pid, signal.SIGINT)
        said, _ = serving.communicate(timeout=60)
    # make ends by the signal, too, unless its caller ignores it
    if serving.returncode not in (0, -signal.SIGINT) or "Traceback" in said or "ended with" in said:
        raise Failed(f"make demo DEMO=serve ended with {serving.returncode} after Ctrl-C, and said:\n{said}")


def try_notebook(clone: Path) -> None:
    """Install what the page of the notebook says, and run its cells."""
    text = (TOP / "docs/spark.md").read_text()
    cells = _BLOCK.findall(text.partition("\n## Step by step\n")[2].partition("\n## ")[0])
    program = clone.parent / "notebook.py"
    program.write_text("\n".join(body for kind, body in cells if kind == "python"))
    run(clone, f"bash deploy/find-java.sh && bash deploy/make-venv.sh {clone}/.venv-spark")
    install = next(line for line in text.splitlines() if line.startswith("pip install"))
    run(clone, f". {clone}/.venv-spark/bin/activate\n{install}")
    # beside the clone, so that the installed package is used
    run(clone.parent, f"{clone}/.venv-spark/bin/python notebook.py")


def try_stamp(clone: Path) -> None:
    """Set up a demo without packages: it fails, and says so to the next run, too."""
    for _ in range(2):
        try:
            run(clone, f"make demo VENV={clone}/.venv-none", PIP_NO_INDEX="1", PIP_FIND_LINKS=str(clone / "docs"))
        except Failed as error:
            if (clone / ".venv-none/.stamp-demo").exists() or "installing tiered_index" not in str(error):
                raise
        else:
            raise Failed("a set-up that can install nothing has succeeded")


TRIALS: dict[str, Callable[[Path], None]] = {
    "notebook": try_notebook,
    "demo": lambda clone: try_demo(clone, "demo"),
    "kafka": lambda clone: try_demo(clone, "kafka"),
    "serve": try_serve,
    "install": try_install,
    "stamp": try_stamp,
}


def _clone(clone: Path) -> None:
    """Make a clone, or a copy of the files if this folder is no repository that the user may clone."""
    done = subprocess.run(["git", "clone", "-q", str(TOP), str(clone)], check=False, capture_output=True)
    if done.returncode:
        made = shutil.ignore_patterns(
            ".git", ".*_cache", ".cache", ".venv*", "__pycache__", "build", "dist", "*.so", "_*.c"
        )
        shutil.copytree(TOP, clone, ignore=made, dirs_exist_ok=True)


def tried(name: str, folder: Path) -> str | None:
    """Run a trial in a clone of its own, and return why it failed; None: it did not."""
    begun_s, clone = time.monotonic(), folder / name / "clone"
    clone.parent.mkdir()
    try:
        _clone(clone)
        TRIALS[name](clone)
    except (Failed, subprocess.SubprocessError, OSError) as error:
        return f"{name}: {error}"
    print(f"{name}: all right, {time.monotonic() - begun_s:.0f} s", flush=True)
    return None


def main(names: list[str]) -> None:
    """Run trials, and exit with 1 if one has failed."""
    with tempfile.TemporaryDirectory(prefix="readme-") as folder, ThreadPoolExecutor(2) as pool:
        problems = [*filter(None, pool.map(lambda name: tried(name, Path(folder)), names or [*TRIALS]))]
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main(sys.argv[1:])
