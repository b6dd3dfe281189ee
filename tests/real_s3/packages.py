"""Ceph's programs without an installation: Debian packages, downloaded once and unpacked into a private folder.

apt resolves and verifies as always. But its lists, its empty status and its archive are in the cache folder. So it
neither reads nor changes the machine's packages. Downloaded packages stay there: this pins a suite that changes, and a
second run needs no network.
"""

import fcntl
import os
import pwd
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

CACHE_VARIABLE = "TIERED_INDEX_TEST_S3_CACHE"
SUITE_VARIABLE = "TIERED_INDEX_TEST_S3_SUITE"
MIRROR_VARIABLE = "TIERED_INDEX_TEST_S3_MIRROR"
DEFAULT_SUITE = "sid"
"""Its Ceph (20.2) honours the conditions of writes. Trixie's (18.2) ignores a condition on the completion of a
multipart upload.
"""

_WANTED = ("radosgw", "ceph-osd", "ceph-mon", "ceph-base", "ceph-common")
_KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
_FALLBACK_MIRROR = "http://deb.debian.org/debian"
_TRIPLETS = {"amd64": "x86_64-linux-gnu", "arm64": "aarch64-linux-gnu"}
_TIMEOUT_S = 900


class MissingPrerequisite(Exception):
    """This machine can't run the server; the message names the missing part."""


def cache_folder() -> Path:
    """Return the folder of packages, programs and state."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).absolute() if named else Path(__file__).parents[2] / ".cache" / "s3-server"


@dataclass(frozen=True)
class Programs:
    """An unpacked suite; its programs run with the suite's own libraries."""

    folder: Path
    triplet: str

    @property
    def libraries(self) -> Path:
        return self.folder / "usr" / "lib" / self.triplet

    def command(self, program: str, *arguments: str) -> list[str]:
        """Return a command line that runs `usr/bin/<program>` by the suite's own dynamic loader."""
        loader = (str(self._loader()), "--library-path", self._library_path())
        return [*loader, str(self.folder / "usr" / "bin" / program), *arguments]

    def python_command(self, script: str, *arguments: str) -> tuple[list[str], dict[str, str]]:
        """Return a command line that runs one of the suite's Python scripts by its own Python, and its environment."""
        bin_folder, lib = self.folder / "usr" / "bin", self.folder / "usr" / "lib"
        interpreters = sorted(bin_folder.glob("python3.[0-9]*"), key=lambda path: (len(path.name), path.name))
        programs = [path.name for path in interpreters if path.name.removeprefix("python3.").isdigit()]
        if not programs:
            raise MissingPrerequisite(f"{bin_folder} has no Python: remove {self.folder} and install again")
        environment = {"PYTHONHOME": str(self.folder / "usr"), "PYTHONPATH": str(lib / "python3" / "dist-packages")}
        return self.command(programs[-1], str(bin_folder / script), *arguments), environment

    def _loader(self) -> Path:
        for folder in ("usr/lib64", "lib64", f"usr/lib/{self.triplet}", "usr/lib", "lib"):
            for loader in sorted((self.folder / folder).glob("ld-linux-*.so.*")):
                return loader
        raise MissingPrerequisite(f"{self.folder} has no dynamic loader: remove it and install again")

    def _library_path(self) -> str:
        usr = self.libraries
        folders = (usr, usr / "ceph", usr / "nss", self.folder / "usr/lib/ceph", self.folder / "lib" / self.triplet)
        return ":".join(map(str, folders))


def install() -> Programs:
    """Download and unpack missing programs; return them. Raises `MissingPrerequisite`."""
    suite = os.environ.get(SUITE_VARIABLE) or DEFAULT_SUITE
    cache = cache_folder()
    cache.mkdir(parents=True, exist_ok=True)
    programs = Programs(cache / suite, _triplet())
    with _locked(cache / "install.lock"):
        if not (programs.folder / "complete").exists():
            archives = _download(cache / f"apt-{suite}", suite)
            _unpack(archives, programs.folder)
    return programs


def _triplet() -> str:
    for program in ("apt-get", "dpkg"):
        if shutil.which(program) is None:
            raise MissingPrerequisite(
                f"{program} is missing: the server is put together from Debian packages. On another system, point "
                "TIERED_INDEX_TEST_S3_ENDPOINT (and TIERED_INDEX_TEST_S3_BUCKET, AWS_ACCESS_KEY_ID, "
                "AWS_SECRET_ACCESS_KEY) at an S3 service"
            )
    if not _KEYRING.exists():
        raise MissingPrerequisite(
            f"{_KEYRING} is missing (package debian-archive-keyring): packages can't be verified without it"
        )
    architecture = _output(["dpkg", "--print-architecture"]).strip()
    if architecture not in _TRIPLETS:
        raise MissingPrerequisite(f"the server runs on {', '.join(_TRIPLETS)}, not on {architecture}")
    return _TRIPLETS[architecture]


def _download(apt: Path, suite: str) -> list[Path]:
    """Return the packages and all their dependencies. Download them unless an earlier download finished."""
    archives, finished = apt / "archives", apt / "downloaded"
    if not finished.exists():
        for folder in (apt / "lists" / "partial", archives / "partial"):
            folder.mkdir(parents=True, exist_ok=True)
        (apt / "status").touch()
        (apt / "sources.list").write_text(f"deb [signed-by={_KEYRING}] {_mirror()} {suite} main\n")
        options = {
            "Dir::Etc::sourcelist": apt / "sources.list",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::Etc::preferences": "/dev/null",
            "Dir::Etc::preferencesparts": "/dev/null",
            "Dir::State::lists": apt / "lists",
            "Dir::State::status": apt / "status",
            "Dir::Cache": apt,
            "Dir::Cache::archives": archives,
            "APT::Install-Recommends": "false",
            "APT::Sandbox::User": pwd.getpwuid(os.getuid()).pw_name,  # apt's own user may not be able to read the cache
            "Acquire::Retries": "3",
            "Debug::NoLocking": "1",
        }
        command = ["apt-get", "-q", *(f"-o{name}={value}" for name, value in options.items())]
        _apt([*command, "update"], f"the list of packages of Debian {suite}")
        _apt([*command, "install", "-y", "--download-only", *_WANTED], f"{', '.join(_WANTED)} of Debian {suite}")
        finished.touch()
    return sorted(archives.glob("*.deb"))


def _apt(command: Sequence[str], what: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    # if apt-get update can't reach a mirror, it ends with 0 and prints a warning
    if done.returncode or "Failed to fetch" in done.stderr:
        raise MissingPrerequisite(
            f"{what} could not be downloaded: is there a network, and a mirror (see "
            f"{MIRROR_VARIABLE})?\n{done.stderr.strip()}"
        )


def _mirror() -> str:
    """Return the machine's own Debian mirror, the one that it can reach."""
    named = os.environ.get(MIRROR_VARIABLE)
    uris = [named] if named else _output(["apt-get", "indextargets", "--format", "$(REPO_URI)"]).split()
    return next(
        (uri for uri in uris if "security" not in uri and uri.rstrip("/").endswith("debian")), named or _FALLBACK_MIRROR
    )


def _unpack(archives: Sequence[Path], target: Path) -> None:
    temporary = target.with_name(f".tmp-{target.name}-{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        for archive in archives:
            subprocess.run(["dpkg", "-x", archive, temporary], check=True, timeout=_TIMEOUT_S)
        (temporary / "complete").write_text("".join(f"{archive.name}\n" for archive in archives))
        shutil.rmtree(target, ignore_errors=True)
        temporary.rename(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Keep other processes from installing into the same cache."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
