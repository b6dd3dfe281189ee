"""A test-only writer: it compacts native files without packing.

`python -m tests.support.plain_files COMMAND` runs a command of `tiered-index` that way. The environment variable
`HOLD_UPLOADS_S` is a number of seconds. The end of each upload of an index file then waits for them, so that
a test can kill it. The file `HOLD_UPLOADS_MARK` is made when one waits.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tests.support.changes import replace
from tiered_index.format.compacted import SealedFile
from tiered_index.format.names import DATA_PREFIX
from tiered_index.service.life import lifecycle
from tiered_index.service.life.context import sealed_form
from tiered_index.service.read.files.unsealed import UnsealedFile
from tiered_index.storage.base import Writer


def _plain_form(file: UnsealedFile) -> SealedFile:
    return replace(sealed_form(file), packed=False)


@contextlib.contextmanager
def plain_files(is_on: object = True) -> Iterator[None]:
    """Leave native files of this process plain while the block runs, if `is_on`."""
    with mock.patch.object(lifecycle, "sealed_form", _plain_form) if is_on else contextlib.nullcontext():
        yield


@contextlib.contextmanager
def held_uploads(seconds: float) -> Iterator[None]:
    """Delay the end of the upload of each index file while the block runs."""
    close = Writer.close

    def wait_and_close(writer: Writer) -> None:
        if writer.name.startswith(DATA_PREFIX):
            if mark := os.environ.get("HOLD_UPLOADS_MARK"):
                Path(mark).touch()
            threading.Event().wait(seconds)
        close(writer)

    with mock.patch.object(Writer, "close", wait_and_close) if seconds else contextlib.nullcontext():
        yield


if __name__ == "__main__":
    from tiered_index.cli.__main__ import run

    with plain_files(), held_uploads(float(os.environ.get("HOLD_UPLOADS_S", "0"))):
        run()
