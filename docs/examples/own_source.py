"""A source of a program's own, which a follower puts into an index."""

import tempfile

from tiered_index import IndexService
from tiered_index.connectors.follow import Follower
from tiered_index.connectors.source import Batch, Lag


class Numbers:
    place, unit, offsets = "numbers", "messages", "offsets"

    def __init__(self, index):
        self.position = index.durable_position("numbers") or 0

    def positions(self):
        return {"numbers": self.position}

    def batches(self):
        for number in range(self.position, 3):
            row = {"topic": "orders", "queue_id": 0, "key": f"order-{number}", "offset": number, "size": 100}
            row["timestamp_ms"] = 1_700_000_000_000
            columns = {name: [value] for name, value in row.items()}
            yield Batch(source="numbers", position=number + 1, columns=columns, messages=1)
            self.position = number + 1  # the follower has put the batch

    def lag(self):
        return Lag(3, 3 - self.position, None)

    def close(self):
        pass


folder = tempfile.TemporaryDirectory()

with IndexService.open(root=folder.name, storage="memory://numbers", environment=False) as index:
    with Follower(index, Numbers(index), follow=False) as follower:
        follower.run()
    assert len(index.query("orders", "order-2")) == 1
