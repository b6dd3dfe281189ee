"""`deploy/find-chromium.sh` finds a browser, installs Debian's package, or says how to get one. The PATH has stubs."""

from pathlib import Path

import pytest

from tests.unit.test_find_java import DEPLOY, Host


def run(folder: Path, **stubs: str) -> tuple[int, str, str]:
    """Run the script with only some programs on PATH. Return its exit code and its output."""
    host = Host(folder, DEPLOY / "find-chromium.sh")
    for name, script in stubs.items():
        host.stub(name.replace("_", "-"), script)
    done = host.run()
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", ["chromium", "chromium_browser", "google_chrome"])
def test_a_browser_on_the_path_is_taken(tmp_path: Path, name: str) -> None:
    code, said, _ = run(tmp_path, **{name: "exit 0"}, id="echo 0", apt_get="exit 100", apt_cache="exit 100")
    assert code == 0 and str(tmp_path / "bin" / name.replace("_", "-")) in said


def test_root_gets_the_package(tmp_path: Path) -> None:
    install = f'[ "$1" != install ] || cp {tmp_path}/bin/id {tmp_path}/bin/chromium'
    code, said, _ = run(tmp_path, id="echo 0", apt_cache="echo 'chromium | 1.0 | archive'", apt_get=install)
    assert (code, said) == (0, "apt-get install -y chromium\n") and (tmp_path / "bin/chromium").exists()


@pytest.mark.parametrize(
    "stubs",
    [
        {"id": "echo 1000", "apt_cache": "echo chromium", "apt_get": "exit 0"},
        {"id": "echo 0", "apt_cache": "exit 0", "apt_get": "exit 0"},
        {"id": "echo 0", "apt_cache": "echo chromium", "apt_get": "exit 0"},
        {"id": "echo 0"},
    ],
    ids=["not root", "no package", "it installs nothing", "no apt"],
)
def test_without_a_package_it_prints_the_remedy(tmp_path: Path, stubs: dict[str, str]) -> None:
    code, _, said = run(tmp_path, **stubs)
    assert code == 1 and "install one (Debian: chromium)" in said
