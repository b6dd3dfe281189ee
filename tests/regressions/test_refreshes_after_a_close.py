"""`refresh` of a closed reader read the log once more, and filled the catalog that the close had emptied."""

from __future__ import annotations

import pytest

from tests.stress.census import census
from tiered_index import IndexReader, IndexService
from tiered_index.errors import IndexClosed

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("kind", ["sqlite", "file"])
@pytest.mark.parametrize("beside", [False, True], ids=["storage alone", "beside a root"])
def test_a_closed_reader_reads_nothing_more(tmp_path, kind, beside):
    uri = f"{kind}://{tmp_path}/storage"
    with IndexService.open(root=tmp_path / "root", storage=uri, slots=7, items=20, background=False) as service:
        service.put("t", 0, "k", 1, 1, NOW_MS)
        service.seal()
        service.run_lifecycle()
    before = census(tmp_path).below
    reader = IndexReader.open(root=tmp_path / "root") if beside else IndexReader.open(uri)
    assert len(reader.query("t", "k")) == 1
    number = reader.refresh().number
    assert number > 0
    reader.close()
    for _ in range(2):
        with pytest.raises(IndexClosed, match="closed"):
            reader.refresh()
    with pytest.raises(IndexClosed, match="closed"):
        reader.query("t", "k")
    assert census(tmp_path).below == before
    assert reader.log_state.number == number
