"""One root and one storage, and `ingest` of files into them."""

import pytest

from tests.integration.cli.command_lines import run_here


@pytest.fixture
def where(tmp_path):
    return "--root", tmp_path / "root", "--storage", f"file://{tmp_path}/objects"


@pytest.fixture
def ingest(where):
    """Return a function that indexes files by keys, and returns the document, or the message of a wrong command."""

    def run(source, *keys, code=0, of=("--topic", "t", "--time", "at")):
        done = run_here("ingest", source, *of, *keys, *where, "--json")
        assert done.code == code, (done.out, done.err)
        return done.error["message"] if code == 2 else done.document

    return run
