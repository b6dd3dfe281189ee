"""`deploy/find-java.sh` finds Java, installs Debian's package, or says how to get Java. The PATH has stubs."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "find-java.sh"


class Host:
    """A machine whose PATH has some tools and stubs. `log` has the arguments of each call of apt."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.log = folder / "bin", folder / "log"
        self.bin.mkdir()
        for tool in ("bash", "sed", "head", "env", "cat", "chmod", "cp"):
            path = shutil.which(tool)
            assert path is not None
            (self.bin / tool).symlink_to(path)
        self.stub("id", "echo 0")

    def stub(self, name: str, script: str) -> None:
        (self.bin / name).write_text(f"#!/bin/bash\n{script}\n")
        (self.bin / name).chmod(0o755)

    def java(self, version: str, name: str = "java") -> None:
        self.stub(name, f"echo 'openjdk version \"{version}\"' >&2")

    def apt(self, *packages: str, installs: str = "17.0.15") -> None:
        """Add Debian's tools, whose archive has `packages`. An installation adds a `java` of version `installs`."""
        self.java(installs, "java-of-the-package")
        known = " ".join(packages)
        self.stub("apt-cache", f'for known in {known}; do [ "$2" != "$known" ] || echo "$2 | 1.0 | archive"; done')
        copy = f"cp {self.bin}/java-of-the-package {self.bin}/java"
        self.stub("apt-get", f'echo "$@" >>{self.log}\ncase "$1" in install) {copy};; esac')

    def run(self, **environment: str) -> subprocess.CompletedProcess[str]:
        env = {"PATH": str(self.bin), **environment}
        command = [str(self.bin / "bash"), str(SCRIPT)]
        return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)

    @property
    def installed(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line.split()[-1] for line in lines if line.startswith("install")]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def test_a_java_on_the_path_or_in_java_home_is_taken(host: Host, tmp_path: Path) -> None:
    host.apt("openjdk-17-jre-headless")
    for version in ("17.0.15", "21.0.2"):
        host.java(version)
        done = host.run()
        assert done.returncode == 0 and f"Java {version[:2]} for Spark" in done.stdout
    java = tmp_path / "home" / "bin" / "java"
    java.parent.mkdir(parents=True)
    shutil.copy(host.bin / "java", java)
    home = str(tmp_path / "home")
    assert host.run(JAVA_HOME=home).returncode == 0
    # it counts before the path, and is not replaced
    java.unlink()
    done = host.run(JAVA_HOME=home)
    assert done.returncode == 1 and f"none was found in JAVA_HOME={home}" in done.stderr
    assert host.installed == []


@pytest.mark.parametrize(("before", "packages", "installs"), [(None, (17, 21), 17), ("1.8.0_402", (21,), 21)])
def test_root_gets_the_package_of_the_release(
    host: Host, before: str | None, packages: tuple[int, ...], installs: int
) -> None:
    if before is not None:
        host.java(before)
    host.apt(*(f"openjdk-{version}-jre-headless" for version in packages), installs=f"{installs}.0.2")
    done = host.run()
    assert (done.returncode, host.installed) == (0, [f"openjdk-{installs}-jre-headless"]), done.stderr


def test_no_package_no_rights_and_no_apt(host: Host) -> None:
    host.java("11.0.2")
    host.apt("default-jre")
    done = host.run()
    assert done.returncode == 1 and "Java 11 was found" in done.stderr and "openjdk-21-jre-headless" in done.stderr
    host.apt("openjdk-17-jre-headless")
    host.stub("id", "echo 1000")
    assert host.run().returncode == 1
    (host.bin / "apt-get").unlink()
    (host.bin / "java").unlink()
    host.stub("id", "echo 0")
    done = host.run()
    assert (done.returncode, host.installed) == (1, []) and "none was found" in done.stderr
