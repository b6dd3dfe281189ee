"""What a merge or a build is expected to send is what is sent."""

from collections import Counter

import pytest

from tests.support.cold_index import Recorder
from tiered_index.service.lifecycle.publication import Upload
from tiered_index.service.merge.run import writing_requests
from tiered_index.storage.memory import MemoryStorage

MIB = 1 << 20


@pytest.mark.parametrize("size", [1, 31 * MIB, 32 * MIB - 1, 32 * MIB, 40 * MIB, 48 * MIB + 1])
def test_requests_of_an_upload(size: int) -> None:
    recorder = Recorder(MemoryStorage())
    upload = Upload(recorder, "data/x/y.index")
    for begin in range(0, size, 5 * MIB):
        upload.write(bytes(min(5 * MIB, size - begin)))
    upload.finish()
    if upload.handle is not None:
        recorder.complete_upload(upload.handle, upload.parts)
    assert recorder.head(upload.name).size_bytes == size
    assert Counter(recorder.operations) == writing_requests(1, size)
    assert writing_requests(3, size).total() == 3 * writing_requests(1, size).total()
