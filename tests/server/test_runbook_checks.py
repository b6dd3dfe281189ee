"""deploy/RUNBOOK.md: the "Check" steps of the entries on leases, lost storages, failovers, restores and standbys.

Each step runs during its incident.
"""

import contextlib
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import pytest

from tests.integration.cli.command_lines import TOP, run_here
from tests.server.conftest import put_entries, serving
from tests.server.test_health import SETTINGS, Life, values
from tiered_index import IndexReader, IndexService
from tiered_index.cli import copying
from tiered_index.errors import TieredIndexError

RUNBOOK = (TOP / "deploy/RUNBOOK.md").read_text()


def steps(alert: str) -> set[str]:
    """Return the commands, metrics and fields that the entry names."""
    (check,) = re.findall(rf"^## {alert}\n.*?^- \*\*Check\*\*: (.*?)^- \*\*Fix", RUNBOOK, re.M | re.S)
    return {" ".join(step.split()) for step in re.findall(r"`([^`]+)`", check)}


def publish(life: Life) -> None:
    put_entries(life.index)
    life.index.seal()
    life.index.run_lifecycle()


def lease_not_held(folder: Path) -> set[str]:
    with contextlib.closing(Life(folder)) as life:
        publish(life)
        with serving(life.index) as client:
            assert values(client)["tiered_index_lease_remaining_seconds",] > 0
        life.index.close()
        life.storage.fail("*", times=None)
        opened: dict[str, Any] = {"disk": life.disk, "storage_backend": life.storage, **SETTINGS}
        with IndexService.open(root=folder / "root", **opened) as again, serving(again) as client:
            assert values(client)["tiered_index_lease_remaining_seconds",] == 0
            assert client.get("/readyz").json()["problems"]
    return {"/readyz", "tiered_index_lease_remaining_seconds"}


def not_ready(folder: Path) -> set[str]:
    with contextlib.closing(Life(folder)) as life, serving(life.index, audit=folder / "audit") as client:
        publish(life)
        (folder / "audit").unlink()
        (folder / "audit").mkdir()
        client.get("/v1/query", params={"topic": "orders", "key": "order-4711"})
        (reason,) = client.get("/readyz").json()["reasons"]
        assert "audit" in reason
        assert reason in [problem["reason"] for problem in client.get("/v1/health").json()["problems"]]
        assert values(client)["tiered_index_ready",] == 0
    return {"curl HOST:8080/readyz", "/v1/health"}


def service_problem(folder: Path) -> set[str]:
    with contextlib.closing(Life(folder)) as life:
        publish(life)
        with IndexReader.open(life.uri) as reader, serving(reader) as client:
            assert run_here("files", "--storage", life.uri).code == 0
            shutil.rmtree(folder / "storage")
            assert client.get("/readyz").json()["problems"]
            assert client.get("/v1/health").json()["problems"][0]["part"] == "storage"
            gone = run_here("files", "--storage", life.uri)
            assert gone.code and "storage" in gone.err
    return {"/v1/health", "/readyz", "tiered-index files --storage URI"}


def taken_over(folder: Path) -> set[str]:
    with contextlib.closing(Life(folder)) as life, serving(life.index) as client:
        publish(life)
        assert values(client)["tiered_index_fenced",] == 0
        assert run_here("recover", "--take-over", "--root", folder / "new", "--storage", life.uri).code == 0
        life.index.seal()
        with pytest.raises(TieredIndexError):
            life.index.put("orders", 0, "k", 1, 1, 1_762_000_000_000)
            life.index.seal()
            life.index.run_lifecycle()
        assert any("a newer writer" in problem for problem in client.get("/readyz").json()["problems"])
        assert values(client)["tiered_index_fenced",] == 1
    return {"/readyz", "tiered_index_fenced"}


def went_back(folder: Path) -> set[str]:
    with contextlib.closing(Life(folder)) as life:
        publish(life)
        shutil.copytree(folder / "storage", folder / "backup")
        life.index.put("orders", 0, "k", 1, 1, 1_762_000_000_000)
        life.index.seal()
        life.index.run_lifecycle()
        before = run_here("verify", "--storage", life.uri, "--json").document
        life.index.close()
        shutil.rmtree(folder / "storage")
        shutil.copytree(folder / "backup", folder / "storage")
        after = run_here("verify", "--storage", life.uri, "--json").document
        assert (before["status"], after["status"]) == ("ok", "ok")
        assert after["checked"]["objects"] < before["checked"]["objects"]
        assert run_here("recover", "--root", folder / "root").code == 0
    return {"tiered-index verify --storage URI"}


def standby_behind(folder: Path) -> set[str]:
    with contextlib.closing(Life(folder)) as life, pytest.MonkeyPatch.context() as patched:
        publish(life)
        rounds = 0

        class Once(copying.Ending):
            """The storage is unreachable in the second round, and the command must end after it."""

            def __enter__(self) -> Self:
                super().__enter__()
                self.event.wait = self.between  # type: ignore[method-assign]
                return self

            def between(self, timeout: float | None = None) -> bool:
                nonlocal rounds
                rounds += 1
                if rounds == 1:
                    (folder / "storage").rename(folder / "away")
                else:
                    self.event.set()
                return True

        patched.setattr(copying, "Ending", Once)
        done = run_here("copy", "--from", life.uri, "--to", f"file://{folder}/standby", "--follow", "--json")
        (folder / "away").rename(folder / "storage")
        first, failed, stopped = done.records
        assert (first["status"], failed["status"], stopped["status"]) == ("following", "failed", "stopped")
        assert failed["lag_s"] >= first["lag_s"] >= 0 and failed["error"]["message"]
    return {"copy --follow --json", "lag_s", "failed"}


CHECKS: dict[str, Callable[[Path], set[str]]] = {
    "TieredIndexLeaseNotHeld": lease_not_held,
    "TieredIndexNotReady": not_ready,
    "TieredIndexServiceProblem": service_problem,
    "TieredIndexTakenOver": taken_over,
    "TieredIndexWentBack": went_back,
    "TieredIndexStandbyBehind": standby_behind,
}


@pytest.mark.parametrize("alert", CHECKS)
def test_the_checks_of_an_entry_show_its_incident(tmp_path: Path, alert: str) -> None:
    assert CHECKS[alert](tmp_path) == steps(alert)
