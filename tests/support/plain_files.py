"""A test-only writer: it compacts native files without packing, as versions before the packed layout did.

`python -m tests.support.plain_files COMMAND` runs a command of `tiered-index` that way. The environment variable
`HOLD_UPLOADS_S` is a number of seconds. The end of each multipart upload of an index file then waits for them, so that
a test can kill it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

from tiered_index.format.compacted import SealedFile
from tiered_index.format.names import DATA_PREFIX
from tiered_index.service.files.unsealed import UnsealedFile
from tiered_index.service.lifecycle import lifecycle, staging
from tiered_index.service.lifecycle.context import sealed_form
from tiered_index.storage.base import UploadHandle
from tiered_index.storage.local.storage import LocalStorage
from tiered_index.storage.s3.storage import S3Storage


def _plain_form(file: UnsealedFile) -> SealedFile:
    return replace(sealed_form(file), packed=False)


@contextlib.contextmanager
def plain_files(is_on: object = True) -> Iterator[None]:
    """Leave native files of this process plain while the block runs, if `is_on`."""
    with contextlib.ExitStack() as stack:
        if is_on:
            for module in (lifecycle, staging):
                stack.enter_context(mock.patch.object(module, "sealed_form", _plain_form))
        yield


def _held(complete: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def wait_and_complete(storage: Any, handle: UploadHandle, *arguments: Any, **named: Any) -> Any:
        if handle.name.startswith(DATA_PREFIX):
            threading.Event().wait(seconds)
        return complete(storage, handle, *arguments, **named)

    return wait_and_complete


@contextlib.contextmanager
def held_uploads(seconds: float) -> Iterator[None]:
    """Delay the end of each multipart upload of an index file while the block runs."""
    with contextlib.ExitStack() as stack:
        for kind in (S3Storage, LocalStorage) if seconds else ():
            held = _held(kind.complete_upload, seconds)
            stack.enter_context(mock.patch.object(kind, "complete_upload", held))
        yield


if __name__ == "__main__":
    from tiered_index.cli.__main__ import run

    with plain_files(), held_uploads(float(os.environ.get("HOLD_UPLOADS_S", "0"))):
        run()
