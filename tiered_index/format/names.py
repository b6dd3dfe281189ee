"""Names of files, folders and objects. SPEC.md section 8.

A local file's state is its folder's name. An object's name is never used twice. Numbers in names have 20 digits, so
names sort as numbers do. Pure, except for random bits in new names.
"""

from __future__ import annotations

import hashlib
import re
import secrets
from urllib.parse import quote, unquote

from tiered_index.errors import CorruptFile, InvalidArgument

UNSEALED, COMPACTED, UPLOADED = STATES = ("unsealed", "compacted", "uploaded")
INDEX_SUFFIX = ".index"
JOURNAL_SUFFIX = ".journal"
LOG_PREFIX, CHECKPOINT_PREFIX, EPOCH_PREFIX = "log/", "checkpoint/", "epoch/"
LEASE_PREFIX, DATA_PREFIX = "lease/", "data/"
SEGMENTS_PREFIX, SEGMENT_SUFFIX, COLUMNS_SUFFIX = "segments/", ".log", ".parquet"
CATALOG_PREFIX, RANGES_PREFIX = "catalog/", "ranges/"
LINKED = "files:"
"""Begin of the stores of linked segments."""
ROWS = "rows:"
"""Begin of the stores of archived rows of files."""
POINTS = "points:"
"""Begin of the stores of restart points of packed files."""
TOPICS_QUEUE = 2**31 - 1
"""The queue of the rows of files whose topic is a field: for all topics, it is one log."""
# The number of last characters of an id that are enough to distinguish it
SHORT_ID = 8
_FILE_ID = re.compile(r"[0-9]{15}-[0-9a-f]{12}")
_NUMBER = re.compile(r"[0-9]{20}")
_ATTEMPT = re.compile(r"[0-9]{20}-[0-9a-f]{16}")
# digits of a record's digest in the name of its checkpoint
DIGEST_DIGITS = 16
_CHECKPOINT = re.compile(rf"checkpoint/([0-9]{{20}})-([0-9a-f]{{{DIGEST_DIGITS}}})")
_OBJECT = re.compile(
    rf"(log|epoch)/{_NUMBER.pattern}|{_CHECKPOINT.pattern}|lease/{_NUMBER.pattern}/{_NUMBER.pattern}|data/[^/]+/[^/]+\.index"
    rf"|segments/[^/]+/{_NUMBER.pattern}/{_ATTEMPT.pattern}\.(log|parquet)"
    rf"|catalog/[^/]+\.segments|ranges/[^/]+\.ranges|probe/[^/]+"
)
_PLAIN = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_+@-")
_MAX_STORE = 128
_PARTITION = re.compile(r"[a-z]+:[^/]+/([^/]+)/([0-9]{1,19})(?:[@#].*)?")
_GENERATION = re.compile(r".*#([0-9]+)[.0-9]*", re.DOTALL)
_QUEUE = re.compile(r".*/([0-9]{1,19})(?:[@#].*)?", re.DOTALL)


def queue_of_log(name: str) -> tuple[str, int] | None:
    """Return topic and queue of a log of one queue, by the name of its store or position; None: it is another log."""
    if (partition := _PARTITION.fullmatch(name)) is None:
        return None
    topic = unquote(partition[1]) if name.startswith((LINKED, ROWS, POINTS)) else partition[1]
    return topic, int(partition[2])


def topic_of_store(store: str) -> str | None:
    """Return the topic of all records of a store of columnar segments; None: it may have messages of many topics."""
    queue = queue_of_log(store)
    return None if queue is None else queue[0]


def queue_id_of_store(store: str) -> int:
    """Return the queue of all records of a store of columnar segments: the number at the end of its name, or 0."""
    queue = _QUEUE.fullmatch(store)
    return 0 if queue is None else int(queue[1])


def generation_of_store(store: str) -> int:
    """Return the number of a log among those that its queue has had: ``#NUMBER`` ends the name of its store, or 0."""
    generation = _GENERATION.fullmatch(store)
    return 0 if generation is None else int(generation[1])


def linked_store(topic: str, queue_id: int) -> str:
    """Return the store of the linked segments of a queue of a topic. That of `TOPICS_QUEUE` is the same for all."""
    if queue_id == TOPICS_QUEUE:
        return f"{LINKED}-/{queue_id}"
    return f"{LINKED}-/{quote(topic, safe='')}/{queue_id}"


def queue_of_store(store: str) -> tuple[str | None, int]:
    """Return the topic (None: of all topics) and the queue of a `linked_store`. Raises `ValueError` for other names."""
    topic, _, queue = store.removeprefix(f"{LINKED}-/").rpartition("/")
    queue_id = int(queue) if queue.isdecimal() else -1
    if linked_store(unquote(topic), queue_id) != store:
        raise ValueError("A store is not one of linked segments")
    return (None, queue_id) if queue_id == TOPICS_QUEUE else (unquote(topic), queue_id)


def rows_store(store: str) -> str:
    """Return the store of the archived rows of the files of a `linked_store`. It has the same offsets."""
    return ROWS + store.removeprefix(LINKED)


def points_store(store: str) -> str:
    """Return the store of the restart points of the files of a `linked_store`. It has the same offsets."""
    return POINTS + store.removeprefix(LINKED)


def new_file_id(begin_ms: int) -> str:
    """Return a new file id: begin timestamp in epoch milliseconds (15 digits) and 48 random bits."""
    return f"{begin_ms:015d}-{secrets.token_hex(6)}"


def file_id_of(name: str) -> str | None:
    """Return the id in a local file name such as ``ID.index`` or ``ID.journal``; None for other names."""
    stem, dot, suffix = name.partition(".")
    return stem if _FILE_ID.fullmatch(stem) and dot + suffix in (INDEX_SUFFIX, JOURNAL_SUFFIX) else None


def is_foreign(name: str) -> bool:
    """Return whether no index uses an object of this name, so that another program has put it there."""
    return _OBJECT.fullmatch(name) is None


def log_name(number: int) -> str:
    """Return the name of log record `number` (from 1)."""
    return LOG_PREFIX + f"{number:020d}"


def checkpoint_name(number: int, digest: str) -> str:
    """Return the name of the checkpoint of log records 1..`number`.

    `digest` is that of record `number`, so that two histories never overwrite each other's checkpoints.
    """
    return f"{CHECKPOINT_PREFIX}{number:020d}-{digest[:DIGEST_DIGITS]}"


def checkpoint_of(name: str) -> tuple[int, str]:
    """Return the number and the digest in a `checkpoint_name`. Raises `CorruptFile` for any other name."""
    if not (match := _CHECKPOINT.fullmatch(name)):
        raise CorruptFile(name, "not a checkpoint of an index")
    return int(match[1]), match[2]


def epoch_name(epoch: int) -> str:
    """Return the name of the object that claims writer epoch `epoch` (from 1)."""
    return EPOCH_PREFIX + f"{epoch:020d}"


def lease_name(epoch: int, number: int) -> str:
    """Return the name of renewal `number` of epoch `epoch`'s lease."""
    return f"{LEASE_PREFIX}{epoch:020d}/{number:020d}"


def data_prefix(file_id: str) -> str:
    """Return the prefix of every upload attempt of a file."""
    return f"{DATA_PREFIX}{file_id}/"


def data_name(file_id: str, attempt: str) -> str:
    """Return the object name of one upload attempt of a file."""
    return f"{data_prefix(file_id)}{attempt}{INDEX_SUFFIX}"


def store_prefix(store: str) -> str:
    """Return the prefix of a store's archived segments. Raises `InvalidArgument` for an empty name, and for half a
    surrogate pair.

    Bytes that are not plain are written as ``=`` and two hexadecimal digits. If this gives more than 128
    characters, the name becomes ``==`` and its digest.
    """
    try:
        named = store.encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"a store's name must be valid Unicode, not {store!r:.80}") from error
    if not named:
        raise InvalidArgument("a store's name must not be empty")
    written = "".join(chr(byte) if byte in _PLAIN else f"={byte:02X}" for byte in named)
    if len(written) > _MAX_STORE:
        written = "==" + hashlib.blake2b(named, digest_size=16).hexdigest()
    return f"{SEGMENTS_PREFIX}{written}/"


def segment_name(store: str, start: int, epoch: int, suffix: str = SEGMENT_SUFFIX) -> str:
    """Return a new object name for one upload attempt of the segment of `store` that begins at offset `start`."""
    return f"{store_prefix(store)}{start:020d}/{epoch:020d}-{secrets.token_hex(8)}{suffix}"


def catalog_name() -> str:
    """Return a new object name for a catalog of segments."""
    return f"{CATALOG_PREFIX}{secrets.token_hex(12)}.segments"


def ranges_name() -> str:
    """Return a new object name for a table of ranges."""
    return f"{RANGES_PREFIX}{secrets.token_hex(12)}.ranges"


def number_of(name: str) -> int:
    """Return the number in a log, checkpoint, epoch or lease name. Raises `CorruptFile` for any other name."""
    if name.startswith(CHECKPOINT_PREFIX):
        return checkpoint_of(name)[0]
    digits = name.rpartition("/")[2]
    if not _NUMBER.fullmatch(digits):
        raise CorruptFile(name, "not a numbered object of an index")
    return int(digits)
