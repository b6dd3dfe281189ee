"""Look up and export on an event loop."""

import asyncio
import tempfile

from tiered_index import AsyncIndexReader, IndexService

with tempfile.TemporaryDirectory() as root, IndexService.open(root=root, storage="memory://awaited") as index:
    index.put("orders", 0, "order-4711", offset=10, size=99, timestamp_ms=1_700_000_000_000)
    index.seal()
    index.run_lifecycle()


async def main() -> None:
    async with await AsyncIndexReader.open("memory://awaited") as reader:
        async with asyncio.timeout(5):
            known, unknown = await asyncio.gather(
                reader.query("orders", "order-4711"), reader.query("orders", "order-1")
            )
        assert (len(known), len(unknown)) == (1, 0)
        async with await reader.export("orders") as export:
            assert sum([len(batch) async for batch in export]) == 1


asyncio.run(main())
