"""Opens a storage by its URI, and lists its children.

    file:///dir                                                             a folder, absolute
    s3://bucket[/prefix][?endpoint_url=&region=&profile=&addressing_style=&request_payer=&client=]
                                                                            a bucket; credentials come from the usual
                                                                            chain
    gs://bucket[/prefix], az://container[/prefix]?account=                  Google's and Azure's stores
    sqlite:///file.db                                                       a database file, absolute
    memory://name                                                           this process's memory

Another package adds a scheme by an entry point of the group `tiered_index.storages`: its name is the scheme, its value
the class. `options_type` of the class declares the URI's parameters, `from_uri` opens the storage.

Every mistake is a `ConfigError` that names the parameter or the part. Messages do not repeat a value that may be a
secret. Threads: any.
"""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar, cast
from urllib.parse import SplitResult, parse_qsl, quote, urlsplit

import msgspec

from tiered_index.errors import ConfigError, ObjectExists, ObjectNotFound
from tiered_index.storage.base import (
    PAGE,
    ObjectInfo,
    Storage,
    StorageOptions,
    StorageRequest,
    WrapperStorage,
    check_name,
    check_prefix,
    list_whole,
)
from tiered_index.storage.disk import Disk, absolute_path
from tiered_index.storage.local import LocalStorage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

_T = TypeVar("_T")
# The class of each scheme, loaded on use
_BUILT_IN = {
    "az": "tiered_index.storage.clouds:AzureStorage",
    "file": "tiered_index.storage.local:LocalStorage",
    "gs": "tiered_index.storage.clouds:GoogleStorage",
    "memory": "tiered_index.storage.memory:MemoryStorage",
    "s3": "tiered_index.storage.s3.storage:S3Storage",
    "sqlite": "tiered_index.storage.sqlite:SqliteStorage",
}
# Spellings of other tools, such as Hadoop's
_SPELLINGS = {"s3a": "s3", "s3n": "s3", "gcs": "gs", **dict.fromkeys(("abfs", "abfss", "wasb", "wasbs"), "az")}
# container@account.dfs.core.windows.net, with the rest of the URI
_OF_HADOOP = re.compile(r"([^/@?]*)@([^/@.?]+)\.(?:dfs|blob)\.([^/?]+)(.*?)(\?\w+=.*)?", re.DOTALL)
# A ? before anything else is a character of an object's name, or a wildcard
_PARAMETERS = re.compile(r"\?(?=\w+=)")
_AZURES_DOMAIN = "core.windows.net"
# A message repeats only a word; anything else may be a secret
_WORD = re.compile(r"[a-z][a-z_-]{0,30}", re.IGNORECASE)
# A word or a path
_PATH = re.compile(r"(?:[.~]{0,2}/)[\w ./~+-]*|\.{1,2}|[a-z][a-z_-]{0,30}/?", re.IGNORECASE)


def open_storage(
    uri: str, *, options: StorageOptions | None = None, disk: Disk | None = None, any_names: bool = False
) -> Storage:
    """Return the storage that `uri` names, without a request. `any_names` is that of `Storage`.

    `options` apply if they are of the backend's class; the URI's parameters win. `disk` applies to `file://`. Raises
    `ConfigError`, among them `StorageMisconfigured` for an unknown profile.
    """
    parts = split_uri(uri)
    backend = _storage_class(parts.scheme)
    kind = backend.options_type
    chosen: Any = options if type(options) is kind else kind()
    if parameters := _parameters(parts):
        # options of other packages may be dataclasses
        change = msgspec.structs.replace if isinstance(chosen, msgspec.Struct) else replace
        chosen = change(chosen, **parameters)
    storage = backend.from_uri(parts, chosen)
    if isinstance(storage, LocalStorage) and disk is not None:
        storage = LocalStorage(storage.folder, disk=disk)
    storage.any_names = any_names
    return storage


def spelled(uri: str) -> str:
    """Return a storage's URI, and that of an object, with this package's scheme: `s3a://bucket/x` as `s3://bucket/x`.

    `abfss://container@account.dfs.core.windows.net/x` becomes `az://container/x?account=account`. Other URIs are
    returned as they are.
    """
    scheme, separator, rest = uri.partition("://")
    if not separator or (known := _SPELLINGS.get(scheme.lower())) is None:
        return uri
    if known != "az" or (parts_of_hadoop := _OF_HADOOP.fullmatch(rest)) is None:
        return f"{known}://{rest}"
    container, account, domain, path, query = parts_of_hadoop.groups()
    parameters = f"account={account}" + ("" if query is None else f"&{query[1:]}")
    if domain.lower() != _AZURES_DOMAIN and "endpoint_url=" not in parameters:
        parameters += f"&endpoint_url=https://{account}.blob.{domain}"
    return f"az://{container}{path}?{parameters}"


def split_parameters(uri: str) -> tuple[str, str]:
    """Return the URI of an object, folder or glob without its parameters, and these, with the question mark."""
    parameters = _PARAMETERS.search(uri)
    return (uri, "") if parameters is None else (uri[: parameters.start()], uri[parameters.start() :])


def beside(uri: str, storage: str | None) -> str:
    """Return the URI of an object or storage with the parameters of `storage`, if it has none and the same scheme.

    So the source of an index is read at the index's endpoint. Hadoop's spelling names the account alone: it takes the
    other parameters of a storage of the same account, or of one that names none.
    """
    place, query = split_parameters(spelled(uri))
    where, _, theirs = spelled(storage or "").partition("?")
    scheme, mark, _ = place.partition("://")
    if theirs and mark and where.lower().startswith(f"{scheme.lower()}://"):
        if not query:
            return f"{place}?{theirs}"
        others = [parameter for parameter in theirs.split("&") if parameter != query[1:]]
        is_account = not split_parameters(uri)[1] and "&" not in query
        if is_account and not any(parameter.startswith("account=") for parameter in others):
            return f"{place}{'&'.join((query, *others))}"
    return spelled(uri)


def _entry_points() -> dict[str, EntryPoint]:
    """Return the storages of other packages by scheme."""
    # imported on use: it takes as long to import as the rest of this layer
    from importlib.metadata import entry_points

    return {
        entry_point.name: entry_point
        for entry_point in entry_points(group="tiered_index.storages")
        if entry_point.name not in _BUILT_IN
    }


def _storage_class(scheme: str) -> type[Storage]:
    """Return the class of a known scheme. Raises `ConfigError` if the class of another package can't be loaded."""
    if scheme in _BUILT_IN:
        return cast(type[Storage], pkgutil.resolve_name(_BUILT_IN[scheme]))
    entry_point = _entry_points()[scheme]
    try:
        kind = entry_point.load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"the storage {scheme}:// ({entry_point.value}) can't be loaded: {error}") from error
    if not (isinstance(kind, type) and issubclass(kind, Storage)):
        raise ConfigError(f"the storage {scheme}:// ({entry_point.value}) is not a subclass of Storage")
    return kind


def split_uri(uri: str) -> SplitResult:
    """Return the parts of a storage's URI. Raises `ConfigError` for an unknown scheme or parameter, or credentials."""
    if not isinstance(uri, str):
        near = f"; did you mean {uri.uri!r}?" if isinstance(uri, Storage) else ""
        raise ConfigError(f"a storage is named by its URI, not by a {type(uri).__name__}{near}")
    uri = spelled(uri)
    scheme, separator, _ = uri.partition("://")
    if not separator or (scheme.lower() not in _BUILT_IN and scheme.lower() not in _entry_points()):
        known = sorted({*_BUILT_IN, *_entry_points()})
        shown = f" ({scheme}://...)" if separator and _WORD.fullmatch(scheme) else ""
        near = f"; did you mean file://{quote(str(absolute_path(uri)))}?" if _PATH.fullmatch(uri) else ""
        if shown:
            near = ". If another package reads such addresses, install it"
        raise ConfigError(
            f"not a storage URI{shown}: a storage URI starts with {', '.join(f'{s}://' for s in known)}{near}"
        )
    try:
        parts = urlsplit(uri)
    except ValueError:
        # no cause: its text has the URI, which may hold a secret
        raise ConfigError(f"not a {scheme}:// URI that can be read") from None
    try:
        uri.encode()
    except UnicodeEncodeError:
        raise ConfigError(
            f"a {scheme}:// URI has bytes that are not UTF-8: write each as % and two hexadecimal digits, such as %FF"
        ) from None
    if parts.fragment or "#" in uri:
        raise ConfigError(f"a {scheme}:// URI has no #fragment (write %23 for the character)")
    if "@" in parts.netloc:
        near = "; write the account so: az://container/prefix?account=NAME" if parts.scheme == "az" else ""
        raise ConfigError(f"a {scheme}:// URI holds no credentials; they come from the environment or a profile{near}")
    _storage_class(parts.scheme).options_type(**_parameters(parts))
    return parts


def _parameters(parts: SplitResult) -> dict[str, str]:
    """Return the query's parameters. Raises `ConfigError` for one that is unknown, empty or repeated."""
    known = _storage_class(parts.scheme).options_type.uri_parameters
    parameters: dict[str, str] = {}
    for name, value in parse_qsl(parts.query, keep_blank_values=True):
        if name not in known:
            choice = f"known: {', '.join(known)}" if known else "there are none"
            shown = f" {name!r}" if value and _WORD.fullmatch(name) else ""
            raise ConfigError(f"unknown parameter{shown} in a {parts.scheme}:// URI ({choice})")
        if not value or name in parameters:
            raise ConfigError(
                f"parameter {name!r} of a {parts.scheme}:// URI {'comes twice' if name in parameters else 'is empty'}"
            )
        parameters[name] = value
    return parameters


def child_storages(storage: Storage, listed: Storage | None = None) -> Iterator[Storage]:
    """Yield the storages one step below `storage` (`uri/child`), in order of name. Lazy.

    For all storages but folders and memory storages, the children are the first segments of the objects' names. That
    costs at most one listing for each child and one for every 1,000 objects that belong to no child.
    """
    if isinstance(storage, (LocalStorage, pkgutil.resolve_name(_BUILT_IN["memory"]))):
        yield from storage.children()
    else:
        for name in _first_parts(listed or storage):
            yield PrefixedStorage(storage, name)


def _first_parts(storage: Storage) -> Iterator[str]:
    part: str | None = None
    listing: Iterator[ObjectInfo] | None = list_whole(storage)
    while listing is not None:
        page, listing = enumerate(listing, 1), None
        for number, info in page:
            first, slash, _ = info.name.partition("/")
            if slash and first != part:
                part = first
                yield part
            if slash and number % PAGE == 0:
                # The next page may have more of the same child: list after it. "0" is the character after "/".
                listing = list_whole(storage, start_after=f"{part}0")
                break


class PrefixedStorage(WrapperStorage):
    """The objects of `inner` under `prefix/`, named without it.

    Closing it leaves `inner` open, because other prefixes may share it.
    """

    def __init__(self, inner: Storage, prefix: str) -> None:
        super().__init__(inner)
        self._base = check_name(prefix) + "/"
        before, mark, query = inner.uri.partition("?")
        self.uri = f"{before.rstrip('/')}/{prefix}{mark}{query}"

    def __repr__(self) -> str:
        return f"PrefixedStorage({self.inner!r}, {self._base[:-1]!r})"

    def head(self, name: str) -> ObjectInfo:
        return replace(super().head(name), name=name)

    def list(self, prefix: str = "", *, start_after: str = "") -> Iterator[ObjectInfo]:
        check_prefix(prefix, start_after)
        infos = self.inner.list(self._base + prefix, start_after=self._base + start_after)
        return (replace(info, name=info.name[len(self._base) :]) for info in infos)

    def close(self) -> None:
        """Leave `inner` open."""

    def _full(self, name: str) -> str:
        # Check the name without the prefix, too: "../x" must be refused
        check_name(name)
        return check_name(self._base + name)

    def _around(self, request: StorageRequest, act: Callable[[], _T]) -> _T:
        """Raise the inner storage's `ObjectNotFound` and `ObjectExists` with the caller's name of the object."""
        try:
            return act()
        except ObjectNotFound as error:
            raise ObjectNotFound(request.name, self.uri) from error
        except ObjectExists as error:
            raise ObjectExists(request.name, self.uri) from error
