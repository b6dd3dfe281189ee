"""`query --messages` and `message` with a follower's root: messages that the broker cut off are not live."""

from tests.support.store_writer import StoreWriter
from tiered_index.rocketmq.log.layout import Host, offset_msg_id

T = 1_700_000_000_000


def test_messages_that_were_cut_off_are_missing_if_the_root_is_given(run_here, tmp_path):
    store, uri = tmp_path / "store", f"file://{tmp_path}/storage"

    places = ("--root", tmp_path / "root", "--storage", uri)
    ingest = ("ingest", store, *places, *["--slots", "97", "--items", "5000", "--skip-missing", "--wait"])
    writer = StoreWriter(store, segment_bytes=1 << 16)
    put = [writer.put("t", 0, b"x" * 50, uniq_key=f"U{number}", store_ms=T + number * 1000) for number in range(30)]
    writer.flush()
    assert run_here(*ingest).code == 0
    writer = StoreWriter(store, segment_bytes=1 << 16, cut=put[10].offset)
    for number in range(3):
        writer.put("t", 0, b"again" * 20, uniq_key=f"new{number}", store_ms=T + 90_000)
    writer.flush()
    assert run_here(*ingest).code == 0
    for number, state in ((9, "local"), (25, "missing")):
        msg_id = offset_msg_id(Host("127.0.0.1", 10911), put[number].offset)
        for line in (
            ("query", "t", f"U{number}", "--messages"),
            ("message", f"U{number}", "--topic", "t"),
            ("message", msg_id),
        ):
            shown = run_here(*line, "--root", tmp_path / "root", "--store", store).out
            assert (f"  {state}\n" in shown) is (state == "local"), line
            assert ("after the end of the log (cut off)" in shown) is (state == "missing"), line
    # the storage alone doesn't show it
    assert "  local\n" in run_here("query", "t", "U25", "--messages", "--storage", uri, "--store", store).out
