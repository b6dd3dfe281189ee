"""Look up a key in the indexes of two brokers at once."""

import tempfile

from tiered_index import IndexReader, IndexService

base = "file://" + tempfile.mkdtemp()
for broker in ("broker-a", "broker-b"):
    with IndexService.open(root=tempfile.mkdtemp(), storage=f"{base}/{broker}", slots=100, items=1000) as index:
        index.put("orders", 0, ["order-4711"], offset=1000, size=512, timestamp_ms=1_700_000_000_000)
        index.seal()
        index.run_lifecycle()  # compacted and uploaded: a reader of the storage sees it

for storages in (base, [f"{base}/broker-b", f"{base}/broker-a"]):
    with IndexReader.open(storages) as cluster:
        answer = cluster.query("orders", "order-4711")
        assert [item.source for item in answer] and {item.source for item in answer} == {
            f"{base}/broker-a",
            f"{base}/broker-b",
        }
        assert answer.status == "complete" and len(answer) == 2
