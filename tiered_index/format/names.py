"""Names of files, folders and objects. The folder's name is a file's state; an object's name is never used twice.

```
root/tiered_index.json  lock  unsealed/ID.index ID.journal  compacted/ID.index  uploaded/ID.index   .tmp-* = half-made work
storage/log/N  checkpoint/N  epoch/E  lease/E/N  data/ID/ATTEMPT.index
```
N and E have 20 digits, so names sort as numbers do. SPEC.md section 8.
"""

from __future__ import annotations

import re
import secrets

from tiered_index.errors import CorruptFile

__all__ = [
    "CHECKPOINT_PREFIX",
    "COMPACTED",
    "DATA_PREFIX",
    "EPOCH_PREFIX",
    "INDEX_SUFFIX",
    "JOURNAL_SUFFIX",
    "LEASE_PREFIX",
    "LOG_PREFIX",
    "STATES",
    "UNSEALED",
    "UPLOADED",
    "checkpoint_name",
    "data_name",
    "data_prefix",
    "epoch_name",
    "file_id_of",
    "lease_name",
    "log_name",
    "new_file_id",
    "number_of",
]

UNSEALED, COMPACTED, UPLOADED = STATES = ("unsealed", "compacted", "uploaded")
INDEX_SUFFIX = ".index"
JOURNAL_SUFFIX = ".journal"
LOG_PREFIX, CHECKPOINT_PREFIX, EPOCH_PREFIX, LEASE_PREFIX, DATA_PREFIX = "log/", "checkpoint/", "epoch/", "lease/", "data/"
_FILE_ID = re.compile(r"[0-9]{15}-[0-9a-f]{12}")
_NUMBER = re.compile(r"[0-9]{20}")


def new_file_id(begin_ms: int) -> str:
    """Return a fresh file id: begin timestamp in epoch milliseconds (15 digits) and 48 random bits."""
    return f"{begin_ms:015d}-{secrets.token_hex(6)}"


def file_id_of(name: str) -> str | None:
    """Return the id in a local file name such as ``ID.index`` or ``ID.journal``, or None where it isn't one of ours."""
    stem, dot, suffix = name.partition(".")
    return stem if _FILE_ID.fullmatch(stem) and dot + suffix in (INDEX_SUFFIX, JOURNAL_SUFFIX) else None


def _digits(number: int) -> str:
    return f"{number:020d}"


def log_name(number: int) -> str:
    """Return the name of log record `number` (from 1)."""
    return LOG_PREFIX + _digits(number)


def checkpoint_name(number: int) -> str:
    """Return the name of the checkpoint of log records 1..`number`."""
    return CHECKPOINT_PREFIX + _digits(number)


def epoch_name(epoch: int) -> str:
    """Return the name of the claim of writer epoch `epoch` (from 1)."""
    return EPOCH_PREFIX + _digits(epoch)


def lease_name(epoch: int, number: int) -> str:
    """Return the name of renewal `number` of epoch `epoch`'s lease."""
    return f"{LEASE_PREFIX}{_digits(epoch)}/{_digits(number)}"


def data_prefix(file_id: str) -> str:
    """Return the prefix of every upload attempt of a file."""
    return f"{DATA_PREFIX}{file_id}/"


def data_name(file_id: str, attempt: str) -> str:
    """Return the object name of one upload attempt of a file."""
    return f"{data_prefix(file_id)}{attempt}{INDEX_SUFFIX}"


def number_of(name: str) -> int:
    """Return the number a log, checkpoint, epoch or lease name ends in; raises `CorruptFile` for any other name."""
    digits = name.rpartition("/")[2]
    if not _NUMBER.fullmatch(digits):
        raise CorruptFile(name, "not a numbered object of an index")
    return int(digits)
