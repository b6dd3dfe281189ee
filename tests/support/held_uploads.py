"""Uploads that wait before their end, so that a test can kill them.

`python -m tests.support.held_uploads COMMAND` runs a command of `tiered-index`. The environment variable
`HOLD_UPLOADS_S` is a number of seconds for which the end of each upload of an index file then waits. The file
`HOLD_UPLOADS_MARK` is made when one waits.
"""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from tiered_index.format.names import DATA_PREFIX
from tiered_index.storage.base import Writer


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

    with held_uploads(float(os.environ.get("HOLD_UPLOADS_S", "0"))):
        run()
