"""A process that only reads needs no boto3 if the environment has the bucket's settings. A lookup takes 3 rounds."""

import contextlib
import json
import os
import threading
import time
from functools import partial
from typing import Any

import pytest

from tests.support.counting_proxy import Action, Request, counting_proxy
from tests.support.loaded import loaded
from tiered_index import IndexService, merge

_WAIT_S = 60


class Together:
    """Holds the answers to some requests until all of them have arrived."""

    def __init__(self, parts: list[str]) -> None:
        self._left, self._all = set(parts), threading.Event()
        self.is_held_alone = False

    def meet(self, part: str) -> None:
        self._left.discard(part)
        if not self._left:
            self._all.set()
        self.is_held_alone |= not self._all.wait(_WAIT_S)


def kind(request: Request) -> str:
    """Return the kind of an index's object that a request names."""
    named = request.path.partition("prefix=")[2].replace("%2F", "/") or request.key
    name = named.partition("index/")[2]
    return f"{'list' if 'prefix=' in request.path else 'get'} {name.partition('/')[0]}"


@pytest.mark.parametrize("state", ["closed", "alive", "gone"])
def test_a_query_loads_no_boto3_and_opens_in_two_rounds(server, tmp_path, state):
    bucket = server.new_bucket()
    uri = f"s3://{bucket}/index?endpoint_url="
    options = {"addressing_style": "path"}
    with pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as writers:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        stored = f"{uri}{server.endpoint_url}"
        settings = {"root": tmp_path / "root", "storage": stored, "s3": options, "background": False}
        with IndexService.open(slots=16, items=60, **settings) as index:
            index.put("t", 0, ["k"], 1, 1, 1_600_000_000_000)
            index.seal()
            index.run_lifecycle()
        merge(stored, window="30d")
        if state != "closed":
            writers.enter_context(IndexService.open(**settings, lease_ttl_s=60 if state == "alive" else 1))
        proxy = writers.enter_context(counting_proxy(server.endpoint_url))
        three = ["list log", "get checkpoint", "get lease"]
        second = Together(three)
        kinds: list[str] = []

        def fault(request: Request) -> Action | None:
            kinds.append(kind(request))
            return Action(hold=partial(second.meet, kinds[-1])) if kinds[-1] in three else None

        proxy.fault = fault
        # a killed writer, as it were
        time.sleep(2 * (state == "gone"))
        names, answer = queried(f"{uri}{proxy.endpoint_url}", server.environment)
    if state == "gone":
        # the service's time
        kinds.remove("get ")
    # the lists of checkpoints and leases, then the held requests together
    first = ["list checkpoint", "list lease"]
    assert sorted(kinds[:-2]) == sorted([*first, *three])
    # the directory, then the slot group
    assert kinds[-2:] == ["get data"] * 2
    assert not second.is_held_alone
    assert not names & {"boto3", "botocore", "pandas", "pyarrow", "pydantic_settings", "sortedcontainers", "urllib3"}
    # 569 and 144 when this was written: each new module is a decision. asyncio has 35, without which a listing could go
    # on for ever at an endpoint that is not Amazon's
    assert len(names) <= 569 + (10 if state == "gone" else 0)
    assert len([name for name in names if name.startswith("tiered_index.")]) <= 144
    assert (len(answer["items"]), answer["status"]) == (1, "complete")
    assert answer["freshness"][0]["writer"]["state"] == state


def queried(uri: str, environment: dict[str, str]) -> tuple[set[str], Any]:
    """Return the modules that a process of `query` loads, and its answer."""
    plain = {name: value for name, value in os.environ.items() if not name.upper().startswith(("AWS_", "HTTP"))}
    names, output = loaded("query", "t", "k", "--storage", uri, "--json", env=plain | environment)
    return names, json.loads(output)
