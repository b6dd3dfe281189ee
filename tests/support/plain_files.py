"""A test-only writer: it compacts native files without packing, as versions before the packed layout did.

`python -m tests.support.plain_files COMMAND` runs a command of `tiered-index` that way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

from tiered_index.format.compacted import SealedFile
from tiered_index.service.files.unsealed import UnsealedFile
from tiered_index.service.lifecycle import lifecycle, staging
from tiered_index.service.lifecycle.context import sealed_form


def _plain_form(file: UnsealedFile) -> SealedFile:
    return replace(sealed_form(file), packed=False)


@contextlib.contextmanager
def plain_files(is_on: object = True) -> Iterator[None]:
    """Leave native files of this process plain while the block runs, where `is_on`."""
    with contextlib.ExitStack() as stack:
        if is_on:
            for module in (lifecycle, staging):
                stack.enter_context(mock.patch.object(module, "sealed_form", _plain_form))
        yield


if __name__ == "__main__":
    from tiered_index.cli.__main__ import run

    with plain_files():
        run()
