"""The comparison with other stores, with few entries: all installed peers give equal answers. No test judges speed."""

import json

import pytest

from tests.benchmarks.peers import __main__ as program
from tests.benchmarks.peers.data import Data
from tests.benchmarks.peers.figures import FIGURES
from tests.benchmarks.peers.registry import PEERS
from tests.benchmarks.peers.worker import check, check_many

ENTRIES = 2_000


@pytest.mark.parametrize("per_key", [1, 4])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_returns_the_put_entries(name, per_key, tmp_path):
    # a server takes seconds to install its tables: once is enough
    if (missing := PEERS[name].missing()) is not None or (PEERS[name].programs and per_key == 1):
        pytest.skip(missing or "measured with four entries per key")
    data = Data(ENTRIES, per_key)
    peer = PEERS[name](tmp_path, ENTRIES)
    assert peer.version()
    peer.open()
    try:
        for batch in data.batches(500):
            peer.put_batch(peer.prepare(batch))
        for _ in ("just written", "settled"):
            numbers = data.drawn(100, 1)
            keys = data.texts(numbers)
            for number, key, absent in zip(numbers.tolist(), keys, data.absent(numbers), strict=True):
                check(peer, data, number, peer.offsets(peer.lookup(key)))
                check(peer, data, -1, peer.offsets(peer.lookup(absent)))
            check_many(peer, data, numbers, keys, peer.lookup_many(keys))
            peer.settle()
    finally:
        peer.close()
    assert peer.stored_bytes() > 0


def test_a_wrong_answer_is_an_error(tmp_path):
    data = Data(ENTRIES, 2)
    peer = PEERS["sqlite"](tmp_path, ENTRIES)
    check(peer, data, 3, [3_000 + 1_000_000, 3_000])
    for wrong in ([3_000], [3_000, 1_003_000, 5_000]):
        with pytest.raises(RuntimeError, match=r"SQLite: key 3 .* offsets \["):
            check(peer, data, 3, wrong)


@pytest.mark.long
def test_a_round_and_its_table(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(PEERS["rocksdb"], "missing", lambda: "module away")
    out = tmp_path / "peers.json"
    sizes = ("--entries", str(ENTRIES), "--per-key", "2", "--rounds", "1", "--commit-entries", "500")
    arguments = (*sizes, "--lookups", "100", "--out", str(out), "--dir", str(tmp_path / "work"))
    program.main([*arguments, "--peers", "tiered_index,rocksdb"])
    printed = capsys.readouterr()
    document = json.loads(out.read_text())
    (size,) = document["sizes"]
    assert set(size["columns"]["tiered_index"]) >= set(FIGURES) and document["skipped"] == {"RocksDB": "module away"}
    assert list((tmp_path / "work").iterdir()) == []
    assert "RocksDB skipped: module away" in printed.out and all(words in printed.out for words in FIGURES.values())
