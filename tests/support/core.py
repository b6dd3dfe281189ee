"""The compiled core, for tests that compare it with NumPy."""

import contextlib
import shutil
from collections.abc import Iterator
from types import ModuleType

import pytest

from tiered_index.base import kernels

_use_numpy = False


def use_numpy() -> None:
    """Make all code of this process use NumPy in place of the core, and skip tests of the core."""
    global _use_numpy
    _use_numpy, kernels._core = True, None


def compiled_core() -> ModuleType:
    """Return the compiled core. Skip the test with ``--numpy`` or without a C compiler."""
    core = kernels.compiled()
    if core is None and (_use_numpy or shutil.which("cc") is None):
        pytest.skip("no C compiler or --numpy, so no compiled core")
    assert core is not None, "the compiled core was not built, though there is a C compiler"
    return core


@contextlib.contextmanager
def using(core: ModuleType | None) -> Iterator[None]:
    """Make all code use `core`, or NumPy if it is None."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_core", core)
        yield
