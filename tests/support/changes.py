"""`replace` for dataclasses and for the `Struct`s of msgspec."""

import dataclasses
from typing import Any, TypeVar

from msgspec import Struct, structs

T = TypeVar("T")


def replace(value: T, **changes: Any) -> T:
    """Return a value with some of its fields changed."""
    of_kind: Any = structs.replace if isinstance(value, Struct) else dataclasses.replace
    changed: T = of_kind(value, **changes)
    return changed
