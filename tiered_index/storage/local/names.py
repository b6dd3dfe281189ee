"""How object names are spelled as local paths, and how a folder tree is read back in order of name.

On disk the last segment of a name is a file and every earlier one is a folder whose name ends in ``%``, a character
that object names can't hold: ``a`` and ``a/b`` are ``a`` and ``a%/b``. A segment longer than `CHUNK` characters (file
systems allow 255 bytes) is cut: each full chunk is a folder ending in ``%%``, and what stands inside starts with ``%``
(so that a rest of ``.`` or ``..`` is harmless). Whatever does not decode is not an object and is never listed.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TypeAlias

from tiered_index.storage.base import ObjectInfo

CHUNK = 200
_SEGMENT = re.compile(r"[A-Za-z0-9._=+@-]+")
# What a directory entry stands for
Kind: TypeAlias = Literal["object", "folder", "chunk"]


def encode(name: str) -> Path:
    """Return the relative path of object `name` (a valid name)."""
    pieces: list[str] = []
    segments = name.split("/")
    for index, segment in enumerate(segments):
        mark, rest = "", segment
        while len(rest) > CHUNK:
            pieces.append(f"{mark}{rest[:CHUNK]}%%")
            mark, rest = "%", rest[CHUNK:]
        pieces.append(mark + rest + ("" if index == len(segments) - 1 else "%"))
    return Path(*pieces)


def decode(entry: str, *, is_folder: bool, in_chunk: bool) -> tuple[Kind, str] | None:
    """Return what the directory entry `entry` stands for and its text, or None where it is not ours."""
    text = entry
    if in_chunk:
        if not text.startswith("%"):
            return None
        text = text[1:]
    kind: Kind = "object"
    if is_folder:
        if text.endswith("%%"):
            kind, text = "chunk", text[:-2]
        elif text.endswith("%"):
            kind, text = "folder", text[:-1]
        else:
            return None
    if not _SEGMENT.fullmatch(text) or len(text) > CHUNK or (kind == "chunk" and len(text) != CHUNK):
        return None
    if not in_chunk and kind != "chunk" and text in {".", ".."}:
        return None
    return kind, text


def walk(path: Path, prefix: str, start_after: str, stem: str = "", in_chunk: bool = False) -> Iterator[ObjectInfo]:
    """Yield the objects under `path`, where names begin with `stem`, in order of whole name, a folder at a time.

    The key of an object is ``text``, of a folder ``text/``: then every name below a folder sorts between its
    neighbours. Only a chunk and the folder of the same text interleave (``K/...`` and ``K0...``), so those two are
    merged.
    """
    objects: dict[str, os.DirEntry[str]] = {}
    folders: dict[str, Path] = {}
    chunks: dict[str, Path] = {}
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                is_folder = entry.is_dir(follow_symlinks=False)
                decoded = decode(entry.name, is_folder=is_folder, in_chunk=in_chunk)
                if decoded is None or not (is_folder or entry.is_file(follow_symlinks=False)):
                    continue
                kind, text = decoded
                if kind == "object":
                    name = stem + text
                    if name.startswith(prefix) and name > start_after:
                        objects[text] = entry
                elif kind == "folder":
                    if _may_hold(stem + text + "/", prefix, start_after):
                        folders[text] = path / entry.name
                elif _may_hold(stem + text, prefix, start_after):
                    chunks[text] = path / entry.name
    except FileNotFoundError:
        return  # removed since its parent was read: it holds nothing now
    keys = [(text, 0, text) for text in objects] + [(text, 1, text) for text in chunks]
    keys += [(text + "/", 2, text) for text in folders if text not in chunks]
    for _, order, text in sorted(keys):
        if order == 0:
            try:
                status = objects[text].stat(follow_symlinks=False)
            except FileNotFoundError:
                continue
            yield ObjectInfo(stem + text, status.st_size, status.st_mtime_ns // 1_000_000)
            continue
        below: list[Iterator[ObjectInfo]] = []
        if order == 1:
            below.append(walk(chunks[text], prefix, start_after, stem + text, True))
        if text in folders:
            below.append(walk(folders[text], prefix, start_after, stem + text + "/"))
        yield from heapq.merge(*below, key=lambda info: info.name) if len(below) > 1 else below[0]


def _may_hold(stem: str, prefix: str, start_after: str) -> bool:
    """Tell whether a name that starts with `stem` can start with `prefix` and sort after `start_after`."""
    return (stem.startswith(prefix) or prefix.startswith(stem)) and (stem > start_after or start_after.startswith(stem))
