"""The compiled core, for tests that compare it with NumPy."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from types import ModuleType

import pytest

from tiered_index import kernels


def compiled_core() -> ModuleType:
    """Return the compiled core. Without a C compiler, skip the test; with one, fail if the core is missing."""
    core = kernels.compiled()
    if core is None and shutil.which("cc") is None:
        pytest.skip("no C compiler, so no compiled core")
    assert core is not None, "the compiled core was not built, though there is a C compiler"
    return core


@contextlib.contextmanager
def using(core: ModuleType | None) -> Iterator[None]:
    """Make all code use `core`, or NumPy if it is None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_core", core)
        yield
