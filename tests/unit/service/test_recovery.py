"""Of two states of a file, a restart keeps the later one."""

import shutil

import pytest

from tests.support.storage_faults import FaultStorage
from tiered_index.errors import StorageUnavailable

T = 1_700_000_000_000


def test_of_two_states_of_a_file_the_later_one_stays(open_index, storage, tmp_path):
    """Also while the storage, whose log would tell, can't be asked."""
    index = open_index("root")
    index.put("t", 0, "k", 1, 1, T)
    index.seal()
    index.run_lifecycle()
    index.abandon()
    (uploaded,) = (tmp_path / "root" / "uploaded").glob("*.index")
    earlier = tmp_path / "root" / "compacted" / uploaded.name
    shutil.copy(uploaded, earlier)
    faulty = FaultStorage(storage)
    faulty.fail("*", times=None)
    index = open_index("root", storage_backend=faulty)
    assert not earlier.exists()
    assert [handle.place for handle in index.files()] == ["uploaded"]
    faulty.clear()
    index.run_lifecycle()
    assert [item.offset for item in index.query("t", "k")] == [1]
    assert len(index.log_state.objects) == 1


@pytest.mark.parametrize("later", ["compacted", "uploaded", "storage"])
def test_an_unsealed_form_that_came_back_is_dropped(open_index, storage, tmp_path, later):
    """A deletion that did not reach the disk; the file has moved on since."""
    faulty = FaultStorage(storage)
    index = open_index("root", storage_backend=faulty, local_keep_s=0 if later == "storage" else 1000)
    index.put("t", 0, "k", 1, 1, T)
    index.seal()
    unsealed = tmp_path / "root" / "unsealed"
    kept = {path.name: path.read_bytes() for path in unsealed.iterdir() if path.name[0].isdigit()}
    if later == "compacted":
        faulty.fail("put", name_prefix="data/")
        with pytest.raises(StorageUnavailable):
            index.run_lifecycle()
    else:
        index.run_lifecycle()
        index.run_lifecycle()
    index.abandon()
    assert len(kept) == 2
    for name, data in kept.items():
        (unsealed / name).write_bytes(data)
    index = open_index("root", storage_backend=faulty)
    assert [handle.place for handle in index.files()] == [later]
    assert not [path.name for path in unsealed.iterdir() if path.name in kept]
    assert [item.offset for item in index.query("t", "k")] == [1]
