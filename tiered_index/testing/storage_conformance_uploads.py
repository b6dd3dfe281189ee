"""The multipart half of the storage contract's suite; `StorageConformance` includes it.

Parts have the least size the storage allows, so objects stay below 16 MiB.
"""

from __future__ import annotations

import contextlib
import json
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from tiered_index.errors import InvalidArgument, ObjectNotFound
from tiered_index.storage.base import PartInfo, Storage, UploadHandle

__all__ = ["UploadConformance"]


class UploadConformance:
    """What every `Storage` must do with multipart uploads."""

    # False for services that refuse to complete an upload unless every uploaded part is named (Ceph's gateway).
    drops_unnamed_parts = True

    def _parts(self, storage: Storage, count: int) -> list[bytes]:
        """Return `count` parts of the least size allowed (at least 1,000 bytes) and a short last one."""
        size = max(storage.min_part_bytes, 1000)
        return [random.Random(n).randbytes(64) * (size // 64 + 1) for n in range(count - 1)] + [b"the end"]

    def test_parts_in_any_order_from_anywhere(self, storage: Storage, another: Storage) -> None:
        first, second, last = self._parts(storage, 3)
        storage.put("big/object", b"old")
        handle = storage.begin_upload("big/object")
        assert handle.name == "big/object"
        handed_over = UploadHandle.from_json(json.loads(json.dumps(handle.to_json())))
        assert handed_over == handle
        with ThreadPoolExecutor(3) as pool:
            work = ((another, 30, last), (storage, 7, first), (another, 12, second))
            infos = list(pool.map(lambda job: job[0].upload_part(handed_over, job[1], job[2]), work))
        assert [(info.number, info.size_bytes) for info in infos] == [(30, 7), (7, len(first)), (12, len(second))]
        assert storage.get("big/object") == b"old"
        assert [(info.name, info.size_bytes) for info in storage.list()] == [("big/object", 3)]
        another.complete_upload(handed_over, infos)
        assert storage.get("big/object") == first + second + last
        assert storage.get_suffix("big/object", 10) == ((second + last)[-10:], len(first + second + last))
        assert list(storage.list_uploads()) == []

    def test_an_unnamed_part_is_dropped(self, storage: Storage) -> None:
        handle = storage.begin_upload("object")
        storage.upload_part(handle, 2, b"never named")
        part = storage.upload_part(handle, 1, b"data")
        if not self.drops_unnamed_parts:
            with pytest.raises(InvalidArgument):
                storage.complete_upload(handle, [part])
            return
        storage.complete_upload(handle, [part])
        assert storage.get("object") == b"data"

    def test_a_repeated_part_replaces(self, storage: Storage) -> None:
        first, last = self._parts(storage, 2)
        handle = storage.begin_upload("object")
        old = storage.upload_part(handle, 2, b"replaced")
        new = storage.upload_part(handle, 2, last)
        one = storage.upload_part(handle, 1, first)
        with pytest.raises(InvalidArgument):
            storage.complete_upload(handle, [one, old])
        storage.complete_upload(handle, [one, new])
        assert storage.get("object") == first + last

    def test_completing_what_can_not_be_completed(self, storage: Storage) -> None:
        handle = storage.begin_upload("object")
        one = storage.upload_part(handle, 1, b"small")
        two = storage.upload_part(handle, 2, b"last")
        wrong: list[list[PartInfo]] = [
            [],
            [one, one],
            [PartInfo(1, two.etag, one.size_bytes)],
            [PartInfo(3, one.etag, one.size_bytes)],
        ]
        if storage.min_part_bytes > 5:
            wrong.append([one, two])
        for parts in wrong:
            with pytest.raises(InvalidArgument):
                storage.complete_upload(handle, parts)
        with pytest.raises(ObjectNotFound):
            storage.get("object")
        one = storage.upload_part(handle, 1, self._parts(storage, 2)[0])
        storage.complete_upload(handle, [two, one])
        assert storage.get_suffix("object", 4) == (b"last", one.size_bytes + 4)

    def test_part_numbers_have_bounds(self, storage: Storage) -> None:
        handle = storage.begin_upload("object")
        for number in (0, -1, 10_001):
            with pytest.raises(InvalidArgument):
                storage.upload_part(handle, number, b"x")
        part = storage.upload_part(handle, 10_000, b"x")
        storage.complete_upload(handle, [part])
        assert storage.get("object") == b"x"

    def test_completing_twice_changes_nothing(self, storage: Storage) -> None:
        handle = storage.begin_upload("object")
        part = storage.upload_part(handle, 1, b"data")
        storage.complete_upload(handle, [part])
        storage.put("object", b"newer")
        with contextlib.suppress(ObjectNotFound):  # S3 answers a repeated completion with its first success
            storage.complete_upload(handle, [part])
        assert storage.get("object") == b"newer"
        assert list(storage.list_uploads()) == []

    def test_an_aborted_upload_is_gone(self, storage: Storage, another: Storage) -> None:
        handle = storage.begin_upload("object")
        part = storage.upload_part(handle, 1, b"data")
        another.abort_upload(handle)
        storage.abort_upload(handle)
        with pytest.raises(ObjectNotFound):
            storage.complete_upload(handle, [part])
        assert list(storage.list_uploads()) == []
        assert list(storage.list()) == []

    def test_parts_of_an_upload_that_is_gone_are_refused(self, storage: Storage) -> None:
        aborted, completed = storage.begin_upload("aborted"), storage.begin_upload("completed")
        storage.abort_upload(aborted)
        storage.complete_upload(completed, [storage.upload_part(completed, 1, b"data")])
        for handle in (aborted, completed):
            with pytest.raises(ObjectNotFound):
                storage.upload_part(handle, 2, b"late")

    def test_a_handle_that_was_never_given_is_refused(self, storage: Storage) -> None:
        real = storage.begin_upload("object")
        for handle in (UploadHandle("object", "0" * 32, 0), UploadHandle("object", "../../x", 0)):
            with pytest.raises(ObjectNotFound):
                storage.complete_upload(handle, [PartInfo(1, "0" * 32, 1)])
            storage.abort_upload(handle)
        assert [handle.upload_id for handle in storage.list_uploads()] == [real.upload_id]

    def test_uploads_are_listed_by_prefix_and_age(self, storage: Storage, another: Storage) -> None:
        names = ("data/a", "data/b", "data/b", "other")
        handles = [storage.begin_upload(name) for name in names]
        storage.upload_part(handles[0], 1, b"x")
        assert sorted(h.upload_id for h in another.list_uploads()) == sorted(h.upload_id for h in handles)
        assert [h.name for h in another.list_uploads("data/")] == ["data/a", "data/b", "data/b"]
        started = max(handle.started_ms for handle in handles)
        assert list(storage.list_uploads(older_than_ms=started - 60_000)) == []
        assert len(list(storage.list_uploads(older_than_ms=started + 60_000))) == 4
        assert storage.abort_uploads(older_than_ms=started - 60_000) == 0
        assert another.abort_uploads("data/b", older_than_ms=started + 60_000) == 2
        assert [h.name for h in storage.list_uploads()] == ["data/a", "other"]
        assert storage.abort_uploads() == 2
        assert list(storage.list_uploads()) == []
