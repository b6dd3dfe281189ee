"""The positions of sources in the log never run ahead of what jobs have published."""

from tests.support.staging import Job, fill, holds


def test_positions_never_run_ahead_of_an_older_file(open_spark, storage, clock, tmp_path):
    index = open_spark()
    fill(index, 1)
    fill(index, 2)
    fill(index, 3)
    index.run_lifecycle()
    first, second, third = (handle.file_id for handle in index.files())
    Job(storage, clock).look().compact(third).publish()
    index.run_lifecycle()
    # the last file alone says position 3: its local copy stays, though the storage has it
    assert index.log_state.positions == {}
    assert [handle.place for handle in index.files()] == ["unsealed"] * 3
    Job(storage, clock).look().compact(first).publish()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 1}
    assert [handle.place for handle in index.files()] == ["storage", "unsealed", "unsealed"]
    index.abandon()
    index = open_spark()
    assert index.durable_position("log") == 3
    index.run_lifecycle()
    Job(storage, clock).look().compact(second).publish()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 3}
    assert [handle.place for handle in index.files()] == ["storage"] * 3
    assert not list((tmp_path / "root" / "unsealed").glob("[0-9]*"))
    holds(storage, clock, 1, 2, 3)


def test_positions_wait_for_quarantine(open_spark, storage, clock):
    index = open_spark()
    fill(index, 1, seal=False)
    index.put("t", 0, "k0", 9, 1, 5_000, source="log", source_position=9)
    index.seal()
    index.run_lifecycle()
    main = next(handle.file_id for handle in index.files() if handle.lane == "main")
    Job(storage, clock).look().compact(main).publish()
    index.run_lifecycle()
    assert index.log_state.positions == {}
    Job(storage, clock).run()
    index.run_lifecycle()
    assert index.log_state.positions == {"log": 9}
    holds(storage, clock, 1, 9)
