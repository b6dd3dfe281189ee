"""Hooks of an embedded writer, and loading ahead."""

import subprocess
import sys
import threading

from tests.support.hanging import until
from tests.support.storage_faults import FaultStorage
from tiered_index.errors import StorageUnavailable
from tiered_index.service.hooks import Hooks

T = 1_700_000_000_000


def test_hooks_are_told_what_is_durable_published_and_wrong(open_index, storage):
    faulty, told, threads = FaultStorage(storage), [], set()

    def hook(name):
        def tell(*arguments):
            told.append((name, *arguments))
            threads.add(threading.current_thread().name)
            # no lock is held, so a hook may call the index
            assert index.query("t", "none").items == [] and index.health()["index_id"]
            raise KeyError("a defect of a hook changes nothing")

        return tell

    hooks = {name: hook(name) for name in ("on_durable", "on_published", "on_problem")}
    pauses = {"flush_interval_s": 0.01, "lifecycle_interval_s": 0.01}
    index = open_index(storage_backend=faulty, background=True, **pauses, **hooks)
    for position in (7, 9):
        index.put("t", 0, "k", position, 1, T, source="s", source_position=position)
        until(lambda position=position: ("on_durable", "s", position) in told)
    assert [each for each in told if each[0] == "on_published"] == []
    faulty.fail("put", times=2, name_prefix="data/", error=lambda _: StorageUnavailable("away"))
    index.seal()
    until(lambda: ("on_published", "s", 9) in told)
    until(lambda: index.health()["problems"] == [])
    assert [each for each in told if each[0] == "on_durable"] == [("on_durable", "s", 7), ("on_durable", "s", 9)]
    problems = [problem for name, problem, *_ in told if name == "on_problem"]
    assert len(problems) <= 1 and all("away" in problem for problem in problems)
    assert threads <= {"tiered-index-flusher", "tiered-index-lifecycle"}


def test_close_tells_the_positions_of_the_last_flush(open_index):
    told = []
    hooks = {name: lambda *at, name=name: told.append((name, *at)) for name in ("on_durable", "on_published")}
    index = open_index(background=True, flush_interval_s=1000, lifecycle_interval_s=1000, **hooks)
    index.put("t", 0, "k", 1, 1, T, source="s", source_position=7)
    index.close()
    assert told == [("on_durable", "s", 7)]
    # nothing was published since
    index.close()
    assert told == [("on_durable", "s", 7)]


def test_a_problem_is_told_once_until_it_is_over():
    told = []
    hooks = Hooks(on_problem=told.append)
    for problems in ([("a", 1)], [("a", 2), ("b", 1)], [("b", 1)], [], [("a", 3)], [("a", 3)]):
        hooks.tell_problems(lambda problems=problems: problems)
    assert told == ["a: 1", "b: 1", "a: 3"]


def test_the_first_call_loads_nothing_after_warm_up(tmp_path):
    program = f"""
import sys
from tiered_index import IndexService
with IndexService.open(root={str(tmp_path / "root")!r}, storage="memory://warm", environment=False) as index:
    index.warm_up()
    loaded = set(sys.modules)
    index.put_batch(dict(topic=["t"], queue_id=[0], key=["k"], offset=[0], size=[1], timestamp_ms=[{T}]))
    index.put("t", 0, "k", 1, 1, {T})
    assert len(index.query("t", "k")) == 2 and index.topics().topics[0].topic == "t"
    print(*sorted(set(sys.modules) - loaded))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr
