"""The console's files, as the service sends them and as the wheel has them.

They are complete, need no token, have a strict policy, and come from nowhere else.
"""

import os
import re
import tomllib
from pathlib import Path
from urllib.parse import urljoin

import pytest

from tests.server.conftest import on_a_port, serving
from tiered_index.server import console
from tiered_index.server.console import FOLDER
from tiered_index.server.http.tokens import add_token

OWN = [path for path in FOLDER.iterdir() if path.suffix in (".html", ".css", ".js", ".svg")]
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def guarded(index, tmp_path_factory):
    """A client without a token, of a service that needs one."""
    path = tmp_path_factory.mktemp("tokens") / "tokens.json"
    add_token(path, "reader", "read", None)
    with on_a_port(index, tokens=path) as client:
        yield client


def test_the_page_needs_no_token_and_has_a_strict_policy(guarded, client):
    got = guarded.get("/", follow_redirects=True)
    assert (got.status_code, got.url.path) == (200, "/console/")
    assert got.headers["content-type"] == "text/html; charset=utf-8"
    policy = got.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe" not in policy
    assert got.headers["x-content-type-options"] == "nosniff"
    assert guarded.get("/console").headers["location"] == "console/"
    for path in ("/console/none.js", "/console/__init__.py", "/console/vendor/README.md", "/v1/topics"):
        assert guarded.get(path).status_code == 401
    assert guarded.post("/console/").status_code == 405
    for path in ("/console/none.js", "/console/%2e%2e/app.py", "/console/__init__.py"):
        assert client.get(path).status_code == 404


def test_no_browser_uses_a_page_of_another_version(index, tmp_path, monkeypatch):
    """Installers link files to a cache, and builds give the files of all versions one time."""
    (tmp_path / "cache").mkdir()
    versions = {}
    for version in (b"1", b"2"):
        folder = tmp_path / version.decode()
        for path in (path for path in FOLDER.rglob("*") if path.is_file()):
            cached, at = tmp_path / "cache" / f"{version.decode()}-{path.name}", folder / path.relative_to(FOLDER)
            cached.write_bytes(path.read_bytes() + b"//" + version)
            os.utime(cached, (0, 0))
            at.parent.mkdir(parents=True, exist_ok=True)
            at.symlink_to(cached)
        monkeypatch.setattr(console, "FOLDER", folder)
        with serving(index) as client:
            # the next version is installed while this one runs
            (folder / "main.js").unlink()
            versions[version] = got = client.get("/console/main.js")
            assert (got.status_code, got.content[-3:]) == (200, b"//" + version)
            earlier = versions[b"1"].headers["etag"]
            again = client.get("/console/main.js", headers={"if-none-match": earlier})
            assert again.status_code == (304 if version == b"1" else 200)
            another = client.get("/console/style.css", headers={"if-none-match": got.headers["etag"]})
            assert (another.status_code, got.headers["cache-control"]) == (200, "no-cache")


def test_everything_it_uses_comes_from_the_service(guarded):
    for path in OWN:
        text = path.read_text()
        # inline code and style, which the policy forbids, and texts parsed as HTML
        assert not re.search(r"\son\w+=|\sstyle=|javascript:|innerHTML|outerHTML|insertAdjacentHTML|\beval\(", text), (
            path
        )
        text = text.replace("http://www.w3.org/2000/svg", "")
        assert "http://" not in text and "https://" not in text, path
        for used in re.findall(r'(?:src|href)="([^"#]+)"|from "(\./[^"]+)"', text):
            at = urljoin(f"/console/{path.name}", next(filter(None, used)))
            assert guarded.get(at).status_code == 200, at


def test_the_wheel_has_every_file_and_the_licence():
    """The test reads the patterns as setuptools does, because the build itself needs a separate environment."""
    described = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = described["tool"]["setuptools"]["package-data"]["tiered_index"]
    shipped = {path for pattern in patterns for path in (ROOT / "tiered_index").glob(pattern)}
    files = {path for path in FOLDER.rglob("*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert len(files) > 10 and files <= shipped
    licences = {path for pattern in described["project"]["license-files"] for path in ROOT.glob(pattern)}
    assert FOLDER / "vendor" / "uplot" / "LICENSE" in licences
