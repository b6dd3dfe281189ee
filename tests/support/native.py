"""Runs the tests of the compiled core with the core under AddressSanitizer and UndefinedBehaviourSanitizer.

    python -m tests.support.native
    python -m tests.support.native --mutations --all

It builds the package with both in a separate folder. Then it runs the tests that compare the core with NumPy on whole,
damaged and hostile input. With `--mutations` it runs the campaign `tests.reliability.core_mutations` instead, with its
options. A read outside a buffer, or undefined arithmetic, ends the run.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

_TOP = Path(__file__).parents[2]
_FLAGS = "-fsanitize=address,undefined -fno-sanitize-recover=undefined -O1 -g"
_TESTS = (
    "tests/unit/test_kernels.py",
    "tests/property/test_view.py",
    "tests/property/test_hidden.py",
    "tests/property/test_puts.py",
    "tests/reliability/test_core_mutations.py",
    "tests/unit/format",
    "tests/golden/test_faults_of_rocketmq.py",
    "tests/unit/service/test_many_local_files.py",
    "tests/unit/service/test_plain_lookups.py",
    "tests/unit/service/test_plain_puts.py",
    "tests/unit/service/test_root_lookups.py",
    "tests/unit/service/test_stored_lookups.py",
    "tests/unit/service/test_lookups_beside_changes.py",
)


def _library(name: str) -> str:
    """Return the path of a library of the compiler."""
    done = subprocess.run(["gcc", f"-print-file-name={name}"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def main() -> int:
    """Build and test; return pytest's exit code."""
    with tempfile.TemporaryDirectory(prefix="tiered-index-native-") as folder:
        build = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*build, "--target", folder, str(_TOP)], env={**os.environ, "CFLAGS": _FLAGS}, check=True)
        libraries = f"{_library('libasan.so')} {_library('libubsan.so')}"
        if len(list(Path(folder, "tiered_index", "base").glob("_*.so"))) != 2:
            print("the core was not built: is gcc installed?", file=sys.stderr)
            return 1
        tests = ["pytest", "-q", "-p", "no:cacheprovider", "-m", "not slow", *_TESTS]
        if sys.argv[1:2] == ["--mutations"]:
            tests = ["tests.reliability.core_mutations", *sys.argv[2:]]
        # the interpreter itself leaves memory allocated at its end
        checks = {"LD_PRELOAD": libraries, "ASAN_OPTIONS": "detect_leaks=0", "PYTHONPATH": f"{folder}:{_TOP}"}
        return subprocess.run(
            [sys.executable, "-P", "-m", *tests], cwd=_TOP, env={**os.environ, **checks}, check=False
        ).returncode


if __name__ == "__main__":
    sys.exit(main())
