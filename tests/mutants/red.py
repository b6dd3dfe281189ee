"""For each seeded defect, a test that the catalogue names fails; `make test-all` runs this file.

A worker of pytest has a private copy of the tree, and puts one defect at a time into it. Without a defect, the named
tests must pass. The working tree is only read. Choose defects by name: `pytest tests/mutants/red.py -k journal`.
"""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutants.catalogue import MUTANTS
from tests.mutants.mutant import PACKAGE, Mutant, Verdict, judge, mutate

TOP = Path(__file__).resolve().parents[2]
TIMEOUT_S = 60.0
_GREEN: dict[str, tuple[Verdict, float]] = {}
"""The verdict of each test without a defect, and the seconds that it took."""


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the files that git tracks, or would track; Python imports the package from there."""
    folder = tmp_path_factory.mktemp("tree")
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=TOP, check=True, capture_output=True).stdout.decode().split("\0")
    for name in filter(None, listed):
        if (TOP / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(TOP / name, folder / name)
    # by content: two versions of a file can have the same time and length
    compileall = [sys.executable, "-m", "compileall", "-q", "--invalidation-mode", "checked-hash", PACKAGE]
    subprocess.run(compileall, cwd=folder, check=True)
    where = [sys.executable, "-c", f"import {PACKAGE}; print({PACKAGE}.__file__)"]
    printed = subprocess.run(where, cwd=folder, env=_environment(folder), check=True, capture_output=True, text=True)
    assert Path(printed.stdout.strip()).resolve().is_relative_to(folder.resolve())
    return folder


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_seeded_defect_turns_a_named_test_red(mutant: Mutant, tree: Path, tmp_path: Path) -> None:
    for test in mutant.tests:
        if test not in _GREEN:
            begun_s = time.monotonic()
            verdict = _run(tree, [test], tmp_path / "green", 5 * TIMEOUT_S)
            _GREEN[test] = verdict, time.monotonic() - begun_s
        assert _GREEN[test][0] is Verdict.GREEN, f"{test} without any defect"
    path, bad = mutate(mutant, tree / PACKAGE)
    good = path.read_text()
    path.write_text(bad)
    # a test that is only slow has not noticed the defect
    sound_s = sum(_GREEN[test][1] for test in mutant.tests)
    try:
        verdict = _run(tree, mutant.tests, tmp_path / "red", TIMEOUT_S + 3 * sound_s)
    finally:
        path.write_text(good)
    assert verdict in (Verdict.RED, Verdict.TIMEOUT), mutant.why


def _environment(tree: Path) -> dict[str, str]:
    ours = ("TIERED_INDEX_", "PYTEST_", "HYPOTHESIS_", "PYTHON")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    return {**inherited, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}


def _run(tree: Path, tests: Sequence[str], scratch: Path, timeout_s: float) -> Verdict:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--tb=no", "-p", "no:cacheprovider", f"--basetemp={scratch}"]
    # a separate session: processes that the tests started end with it
    process = subprocess.Popen(
        [*command, *tests],
        cwd=tree,
        env=_environment(tree),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Verdict.TIMEOUT
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return judge(tests, process.returncode, output)
