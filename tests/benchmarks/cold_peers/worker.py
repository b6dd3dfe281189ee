"""A process of one store: builds it, or looks up one key and ends, or answers its parent until that process ends.

A store's module has `build`, `writer` and `Reader`. Lookups return [second, offset, queue] of a key's newest entries.
The argument is a JSON object: `module`, `phase` (``build``, ``once``, ``serve``, ``write``), `place`, and
more fields for the phase. The time of a new process runs from its start to its end, so this module imports only the
modules that every process needs. CPU time is that of all threads.
"""

import importlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

_AT_ONCE = 32


def main(argument: str) -> None:
    """Do the job that the argument names."""
    job = json.loads(argument)
    system = importlib.import_module(f"tests.benchmarks.cold_peers.{job['module']}")
    _PHASES[job["phase"]](system, job)


def _build(system: Any, job: dict[str, Any]) -> None:
    before_s = time.process_time()
    prefixes = system.build(job["place"], Path(job["source"]), **job.get("options", {}))
    _say({"cpu_s": time.process_time() - before_s, "prefixes": prefixes})


def _once(system: Any, job: dict[str, Any]) -> None:
    reader = system.Reader(job["place"], **job.get("options", {}))
    answer = reader.lookup(job["key"], job["count"])
    _say({"answers": [answer]})
    reader.close()


def _serve(system: Any, job: dict[str, Any]) -> None:
    reader = system.Reader(job["place"], **job.get("options", {}))
    _say({})
    for line in sys.stdin:
        request = json.loads(line)
        _say(_TASKS[request["task"]](reader, request))
    reader.close()


def _each(reader: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Look keys up one after another. A store can have a separate call for hot keys."""
    look_up = getattr(reader, "lookup_hot", reader.lookup) if request["hot"] else reader.lookup
    answers, walls_ms = [], []
    for key in request["keys"]:
        started_s = time.perf_counter()
        answers.append(look_up(key, request["count"]))
        walls_ms.append((time.perf_counter() - started_s) * 1e3)
    return {"answers": answers, "walls_ms": walls_ms}


def lookup_at_once(reader: Any, keys: list[str]) -> Any:
    """Look keys up by 32 threads, if the store has no batch call of its own."""
    # not at the top: the time of a new process includes its imports
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(lambda key: reader.lookup(key, 64), keys))


def _together(reader: Any, request: dict[str, Any]) -> dict[str, Any]:
    own = getattr(reader, "lookup_many" if request["task"] == "many" else "lookup_at_once", None)
    look_up = own or partial(lookup_at_once, reader)
    started_s = time.perf_counter()
    answers = look_up(request["keys"])
    return {"answers": answers, "wall_ms": (time.perf_counter() - started_s) * 1e3}


def _seen(reader: Any, request: dict[str, Any]) -> dict[str, Any]:
    """Return when a lookup found the key's newest entry, or nothing when the time for an absent key ended."""
    end_s = time.monotonic() + request["timeout_s"]
    while time.monotonic() < end_s:
        if reader.lookup(request["key"], 1):
            return {"at_s": time.monotonic()}
        time.sleep(0.01)
    if request.get("absent"):
        return {}
    raise TimeoutError(f"an entry was not readable after {request['timeout_s']} s")


def _memory(*_: object) -> dict[str, Any]:
    from tests.benchmarks.memory import memory_bytes

    return {"mib": memory_bytes("self", "VmHWM") / (1 << 20)}


def _write(system: Any, job: dict[str, Any]) -> None:
    """Put one entry for each key that the parent names, and print the time."""
    with system.writer(job["place"]) as put:
        _say({})
        for line in sys.stdin:
            request = json.loads(line)
            at_s = time.monotonic()
            put(request["key"])
            _say({"at_s": at_s})


def _say(document: dict[str, Any]) -> None:
    print(json.dumps(document), flush=True)


_PHASES = {"build": _build, "once": _once, "serve": _serve, "write": _write}
_TASKS = {"each": _each, "many": _together, "at_once": _together, "memory": _memory, "seen": _seen}

if __name__ == "__main__":
    main(sys.argv[1])
