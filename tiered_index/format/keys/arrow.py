"""Stored columns as Arrow arrays. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy.typing as npt
import pyarrow as pa

from tiered_index.errors import InvalidArgument
from tiered_index.format.schema import listed, texts

Array = npt.NDArray[Any]


def array_of(values: Array, kind: Any) -> Any:
    """Return the values of a stored column (n) as an Arrow array of type `kind`.

    Bytes have their full width, unless `kind` is that of text.
    """
    if values.dtype.kind in "SV":
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return pa.array(texts(values), kind)
        return pa.array(listed(values), kind)
    native = pa.array(values.astype(values.dtype.newbyteorder("="), copy=False))
    # Arrow casts unsigned 64-bit numbers to decimals only from text
    return native.cast(pa.string()).cast(kind) if pa.types.is_decimal(kind) else native.cast(kind)


def topic_names(ids: Array, names: Mapping[int, str]) -> Any:
    """Return the name of each topic id (n), null if a damaged entry has none.

    Raises `InvalidArgument` for a lone surrogate.
    """
    encoded = array_of(ids, pa.int32()).dictionary_encode()
    try:
        texts = pa.array([names.get(topic_id) for topic_id in encoded.dictionary.to_pylist()], pa.string())
    except UnicodeEncodeError as error:
        raise InvalidArgument(
            f"topic {error.object!r:.80} has a lone surrogate, which can't be exported as text"
        ) from error
    return texts.take(encoded.indices)
