"""`ingest STORE_DIR` compares every body with its CRC. The loss of a wrong body names its offsets."""

import pytest

from tests.integration.cli.followers import SMALL
from tests.rocketmq.followed import SEGMENT
from tests.support.store_writer import StoreWriter
from tiered_index import IndexReader

BAD = 40


@pytest.fixture
def store(tmp_path):
    """A store of a running broker, with one flipped bit in the body of message 40 of 100."""
    writer = StoreWriter(tmp_path / "store", segment_bytes=SEGMENT)
    put = [writer.put("orders", 0, b"body %d" % n, keys=f"own-{n}", store_ms=1_700_000_000_000 + n) for n in range(100)]
    writer.flush()
    segment = tmp_path / "store" / "commitlog" / f"{put[BAD].offset // SEGMENT * SEGMENT:020d}"
    data = bytearray(segment.read_bytes())
    data[data.index(b"body 40")] ^= 1
    segment.write_bytes(data)
    return writer, put[BAD], segment


def numbers_found(root):
    with IndexReader.open(root=root) as reader:
        return [n for n in range(100) if len(reader.query("orders", f"own-{n}"))]


def test_it_is_skipped_and_reported_or_not_looked_at(run_here, tmp_path, small_index, store):
    writer, bad, _ = store
    skipped = run_here("ingest", writer.root, *small_index, "--skip-corrupt")
    assert skipped.code == 0, skipped.err
    (loss,) = skipped.document["losses"]
    assert (loss["kind"], loss["begin"], loss["end"]) == ("corrupt", bad.offset, bad.offset + bad.size)
    assert "the body contradicts its CRC" in loss["problem"]
    assert skipped.document["messages"] == 99
    assert numbers_found(tmp_path / "root") == [n for n in range(100) if n != BAD]
    other = ("--root", tmp_path / "other", "--storage", f"file://{tmp_path / 'more'}")
    unchecked = run_here("ingest", writer.root, *other, *SMALL, "--json", "--no-check-bodies")
    assert (unchecked.code, unchecked.document["messages"], unchecked.document["losses"]) == (0, 100, [])
