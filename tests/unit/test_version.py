"""In a clone, a work tree and a wheel the version includes the commit. Without a commit it is the release."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tiered_index.base.version import RELEASE, version_of

TOP = Path(__file__).parent.parent.parent
COMMIT = "0123456789abcdef0123456789abcdef01234567"
VERSION = f"{RELEASE}+g0123456789ab"


@pytest.fixture
def git(tmp_path):
    """A repository on branch main. The test writes its commit."""
    folder = tmp_path / ".git"
    (folder / "refs/heads").mkdir(parents=True)
    (folder / "HEAD").write_text("ref: refs/heads/main\n")
    return folder


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("refs/heads/main", f"{COMMIT}\n"),
        ("packed-refs", f"# pack-refs\n{'f' * 40} refs/heads/other\n{COMMIT} refs/heads/main\n"),
        ("HEAD", COMMIT),
    ],
    ids=["a branch", "a packed branch", "a commit without a branch"],
)
def test_a_commit_of_a_clone_and_of_its_work_tree(git, tmp_path, file, text):
    (git / file).write_text(text)
    assert version_of(tmp_path) == VERSION
    own, tree = git / "worktrees/tree", tmp_path / "tree"
    own.mkdir(parents=True)
    (own / "HEAD").write_text((git / "HEAD").read_text())
    (own / "commondir").write_text("../..\n")
    tree.mkdir()
    (tree / ".git").write_text(f"gitdir: {own}\n")
    assert version_of(tree) == VERSION


@pytest.mark.parametrize("head", [None, "", "ref: refs/heads/gone", "no commit", "ref: ../../../etc"])
def test_no_repository_or_one_that_is_not_understood(git, tmp_path, head):
    (git / "HEAD").unlink() if head is None else (git / "HEAD").write_text(head)
    assert version_of(tmp_path) == version_of(tmp_path / "nowhere") == RELEASE


@pytest.mark.parametrize(("commit", "version"), [(COMMIT, VERSION), ("", f"{RELEASE}+gffffffffffff")])
def test_a_build_holds_the_version_as_text(git, tmp_path, commit, version):
    # without pyproject.toml, which older versions of setuptools refuse
    (tmp_path / "setup.cfg").write_text(
        "[metadata]\nname = tiered_index\n[options]\npackages =\n  tiered_index\n  tiered_index.base\n"
    )
    (git / "HEAD").write_text("f" * 40)
    for folder in ("tiered_index", "tiered_index/base"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "__init__.py").touch()
    for name in ("setup.py", "tiered_index/base/version.py"):
        shutil.copy(TOP / name, tmp_path / name)
    line = [sys.executable, "-W", "ignore", "setup.py", "-q", "build_py", "--build-lib", "built"]
    subprocess.run(line, cwd=tmp_path, check=True, env=os.environ | {"TIERED_INDEX_COMMIT": commit}, timeout=60)
    built = tmp_path / "built/tiered_index/base/version.py"
    assert runpy.run_path(str(built))["__version__"] == version
    assert "git" not in built.read_text()
