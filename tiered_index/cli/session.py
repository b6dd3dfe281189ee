"""The session of a command: common options, settings, output, index, and the exit codes of errors.

An error is reported once, on stderr. The exit code is the `exit_code` of a typed error, or one of `exit_codes`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, ParamSpec

import typer

from tiered_index.base.clock import Clock, SystemClock
from tiered_index.cli.declaring import CommonOptions, group_of
from tiered_index.cli.exit_codes import CLOSED_PIPE, INTERRUPTED, UNEXPECTED
from tiered_index.cli.explaining import print_not_read
from tiered_index.cli.options import ServiceOptions
from tiered_index.cli.output import JsonFormatter, Output, PrintableFormatter, describe_error, discard
from tiered_index.config import IndexConfig, holds, with_value
from tiered_index.connectors.options import pairs
from tiered_index.errors import (
    BudgetExceeded,
    ConfigError,
    CorruptFile,
    InvalidArgument,
    NotAnIndex,
    SetupUnavailable,
    TieredIndexError,
)
from tiered_index.format.names import file_id_of, is_foreign
from tiered_index.service.log.identity import RootBeside
from tiered_index.service.log.log import StorageLog
from tiered_index.service.reader import IndexReader
from tiered_index.service.root import Root
from tiered_index.storage.disk import DELETED_FOLDER, Disk, absolute_path
from tiered_index.storage.metering import MeteredStorage

if TYPE_CHECKING:
    from tiered_index.client import IndexClient

TOO_LITTLE_MEMORY = (
    "the process has too little memory: give it more, by `ulimit -v` or its container's limit, or bound its buffers "
    "and caches in the settings"
)
_SETTINGS = "TIERED_INDEX_"
# file of a damage that a service reported; a text because the client loads httpx
_OF_SERVICE = "the index"
# logger of repeated requests
_RETRIES = "tiered_index.storage.retry"
P = ParamSpec("P")
# Python's form of bytes of the command line that are not UTF-8
_SURROGATE = re.compile("[\ud800-\udfff]")
# parameters that name files of the caller, whose names may have any bytes
_LOCAL_FILES = frozenset({"source", "sources", "file", "files", "keys", "out", "messages", "report"})

LogFormat = Literal["text", "json"]


@dataclass(frozen=True)
class Session:
    """The options and the output of one command."""

    out: Output
    root: Path | None = None
    storages: tuple[str, ...] = ()
    config_file: Path | None = None
    settings: tuple[str, ...] = ()
    debug: bool = False

    @property
    def storage(self) -> str | None:
        """The one storage that was given. Raises `InvalidArgument` for several."""
        if len(self.storages) > 1:
            raise InvalidArgument(
                f"--storage is given {len(self.storages)} times: give it once, since only query, topics and serve read "
                "several indexes"
            )
        return next(iter(self.storages), None)

    def config(self, **settings: Any) -> IndexConfig:
        """Return the settings: file, environment, `--set`, options, then `settings` (None: not given).

        Raises `ConfigError`, `InvalidArgument`.
        """
        values: dict[str, Any] = {}
        for name, value in pairs("--set", self.settings).items():
            # the topic in retention.topics.TOPIC may have a dot
            path = name.split(".", 2)
            if holds(values, path):
                raise InvalidArgument(f"--set {name} and another --set give the same setting: leave one of them out")
            values = with_value(values, path, value)
        named = {"root": self.root, "storage": self.storage, **settings}
        values |= {name: value for name, value in named.items() if value is not None}
        return IndexConfig.load(self.config_file, **values)

    def reader_config(self) -> IndexConfig:
        """Return the `config` of one or several storages. Raises `InvalidArgument` for several storages and a root."""
        if len(self.storages) < 2:
            return self.config()
        config = replace(self, storages=()).config()
        if config.root is not None:
            raise InvalidArgument(f"leave the root {config.root} out: several storages are read without one")
        return config

    def open_reader(self, config: IndexConfig, *, with_writers: bool = False) -> IndexReader:
        """Open the index that the options name, `with_writers` for `IndexReader.writers`. Raises as it."""
        several = self.storages if len(self.storages) > 1 else None
        if config.root is None and config.storage is None and several is None:
            raise ConfigError("no index is given: pass --storage URI, --root DIR, or both")
        # with a root the reader knows its writer
        return IndexReader(config, storages=several, with_writers=with_writers and config.root is None)

    def log_as(self, log_format: LogFormat) -> None:
        """Write the log, notes and errors to stderr as lines of text or of JSON."""
        if log_format == "json":
            self.out.logs_json = True
            for handler in filter(None, (*logging.getLogger("tiered_index").handlers, logging.lastResort)):
                handler.setFormatter(JsonFormatter())


@dataclass(frozen=True)
class StoredIndex:
    """A metered storage and its log, which has been read."""

    storage: MeteredStorage
    log: StorageLog
    clock: Clock

    @property
    def costs(self) -> dict[str, Any]:
        """Requests so far by operation and their estimated cost, as fields of a document."""
        total = self.storage.total
        return {"requests": total.requests_by_kind, "cost_usd": total.cost_usd}


def storage_uri(config: IndexConfig) -> str:
    """Return the URI that `config` or its root's marker names. Raises `ConfigError` if neither does."""
    uri = config.storage
    if uri is None and config.root is not None:
        marker = Root(config.root, Disk()).read_marker()
        uri = marker.storage if marker is not None else None
    if uri is None:
        raise ConfigError("no storage is given: pass --storage URI, or --root of an index that has one")
    return uri


@contextlib.contextmanager
def open_stored_index(config: IndexConfig, *, checks: bool = True) -> Iterator[StoredIndex]:
    """Yield the index in `storage_uri(config)`, `checks` as in `StorageLog.open`. Raises as both.

    Also raises `StorageUnavailable`.
    With `checks` it also raises `NotAnIndex` if the root is of another index, and `StorageBehind` if the root has seen
    another log. A root that is older than its own records is `RootBehind`.
    """
    uri = storage_uri(config)
    root = Root(config.root, Disk()) if checks and config.root is not None else None
    # read before the log, because a running writer notes each record that it appends
    beside = RootBeside(root) if root is not None else None
    clock = SystemClock()
    storage = MeteredStorage(config.open_storage(uri), config.prices)
    with contextlib.closing(storage):
        log = StorageLog(storage, clock)
        log.open(checks=checks)
        if beside is not None and check_root_of(config, log):
            beside.check(log.identity, log.state)
        yield StoredIndex(storage, log, clock)


def check_root_of(config: IndexConfig, log: StorageLog) -> bool:
    """Return whether `config` names a root of an index. Raises `NotAnIndex` if it is not the index of the log."""
    marker = Root(config.root, Disk()).read_marker() if config.root is not None else None
    genesis = log.state.genesis
    if marker is None or genesis is None:
        return False
    if marker.index_id != genesis.index_id:
        raise NotAnIndex(
            f"{log.storage.uri} holds index {genesis.index_id}, and root {config.root} is of index "
            f"{marker.index_id}: leave one of them out"
        )
    return True


def asked_service(session: Session, service: ServiceOptions, **others: object) -> IndexClient | None:
    """Return a client of the service at `--url`, None without it.

    `others` are further options that can't be combined with `--url`. Raises `InvalidArgument` if one is set,
    `ConfigError` if the token can't be read.
    """
    url, token_file = service.url, service.token_file
    if url is None:
        if token_file is not None:
            raise InvalidArgument("--token-file is for a service: give --url, too")
        return None
    own: dict[str, object] = {"root": session.root, "storage": session.storages, "config": session.config_file}
    own |= {"set": session.settings, **others}
    wrong = next((name for name, value in own.items() if value), None)
    if wrong is not None:
        flag = wrong.upper() if wrong in ("file", "files") else f"--{wrong.replace('_', '-')}"
        raise InvalidArgument(f"--url asks a service, which has its own index: leave {flag} out")
    from tiered_index.client import IndexClient

    try:
        token = token_file.read_text().strip() if token_file is not None else None
    except OSError as error:
        raise ConfigError(f"{token_file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{token_file} holds no token: it is not a text file") from error
    return IndexClient(url, token=token)


def run(
    work: Callable[..., int],
    common: CommonOptions,
    groups: Mapping[str, Any],
    flags: dict[str, str],
    values: dict[str, Any],
) -> int:
    """Do the work of a command with the values of its options, and return the exit code; errors are reported.

    `groups` are the dataclasses of options by the parameters that get them, `flags` the flags of options by the names
    that errors use.
    """
    _set_up_logging(verbose=common.verbose, debug=common.debug, quiet=common.quiet)
    out = Output(as_json=common.json, quiet=common.quiet)
    out.flags = flags
    session = Session(
        out, common.root, tuple(common.storage or ()), common.config, tuple(common.settings or ()), common.debug
    )
    return _guarded(session, partial(_called, work, session, groups, values))


def _called(work: Callable[..., int], session: Session, groups: Mapping[str, Any], options: dict[str, Any]) -> int:
    """Call the function of a command with its options. Raises as it, and `InvalidArgument`."""
    for name, value in (*options.items(), ("storage", session.storages), ("set", session.settings)):
        if isinstance(value, Path):
            # raises for a text that no file can have as its name
            absolute_path(value)
        elif name not in _LOCAL_FILES or _is_of_scheme(value):
            _check_text(session.out.flags.get(name, name.replace("_", "-")), value)
    for name, kind in groups.items():
        options[name] = group_of(kind, options)
    return work(session, **options)


def _is_of_scheme(value: object) -> bool:
    texts = value if isinstance(value, list | tuple) else (value,)
    return any(isinstance(text, str) and "://" in text for text in texts)


def _check_text(name: str, value: object) -> None:
    """Raise `InvalidArgument` for an argument that is not UTF-8: no key, topic or name of an index is such text."""
    for text in value if isinstance(value, list | tuple) else (value,):
        if isinstance(text, str) and _SURROGATE.search(text) is not None:
            raise InvalidArgument(
                f"{name} {text[:100]!r} is not UTF-8, so it can't be compared with text of the index: set the terminal "
                "and the script to UTF-8"
            )


def _guarded(session: Session, act: Callable[[], int]) -> int:
    try:
        code = act()
        session.out.flush()
    except TieredIndexError as error:
        _report(session, error, str(error), describe_error(error))
        return error.exit_code
    except BrokenPipeError:
        discard(sys.stdout)  # the reader has closed the pipe
        return CLOSED_PIPE
    except KeyboardInterrupt:
        session.out.note("interrupted")
        return INTERRUPTED
    except (typer.Exit, typer.Abort, typer.BadParameter):
        raise
    except MemoryError as error:
        little = SetupUnavailable(f"{TOO_LITTLE_MEMORY}{f': {error}' if str(error) else ''}")
        _report(session, little, str(little), describe_error(little))
        return little.exit_code
    except Exception as error:  # noqa: BLE001 - the outermost frame reports unexpected errors
        if isinstance(error, FileNotFoundError) and not _has_working_folder():
            gone = ConfigError(DELETED_FOLDER)
            _report(session, gone, str(gone), describe_error(gone))
            return gone.exit_code
        hint = "" if session.debug else " (--debug shows where)"
        _report(session, error, f"unexpected {type(error).__name__}: {error}{hint}", {"exit_code": UNEXPECTED})
        return UNEXPECTED
    return code


def _has_working_folder() -> bool:
    try:
        Path.cwd()
    except FileNotFoundError:
        return False
    return True


def _report(session: Session, error: Exception, message: str, details: dict[str, Any]) -> None:
    if session.debug:
        session.out.traceback(error)
    session.out.error(type(error).__name__, message, **details)
    if isinstance(error, BudgetExceeded):
        print_not_read(session.out, error.failed)
    if type(error) is CorruptFile and "`" not in message and "--" not in message and _is_of_index(error.file):
        session.out.error_line(
            "run `tiered-index verify --deep` to list the damage, and `verify --deep --repair` to mend it"
        )


def _is_of_index(file: str) -> bool:
    """Return whether an error's file is an object or a local file of an index, and no input."""
    return not is_foreign(file) or file_id_of(Path(file).name) is not None or file == _OF_SERVICE


class _OneASecond(logging.Filter):
    """Logging filter that passes at most one record a second."""

    _passed_s = -math.inf

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether the last record passed at least a second ago."""
        now_s = time.monotonic()
        if now_s - self._passed_s < 1.0:
            return False
        self._passed_s = now_s
        return True


def _set_up_logging(*, verbose: bool, debug: bool, quiet: bool = False) -> None:
    level = logging.DEBUG if debug else logging.INFO if verbose else logging.WARNING
    logger = logging.getLogger("tiered_index")
    logger.setLevel(level)
    logger.propagate = False
    handler = logging.StreamHandler(sys.stderr)
    formatter = PrintableFormatter("%(levelname)s %(name)s: %(message)s")
    handler.setFormatter(formatter)
    logger.handlers = [handler]
    retries = logging.getLogger(_RETRIES)
    retries.setLevel(level if quiet or verbose or debug else logging.INFO)
    retries.filters = [] if verbose or debug else [_OneASecond()]
    if logging.lastResort is not None:
        # warnings of other packages may quote unprintable answers of servers
        logging.lastResort.setFormatter(formatter)
