"""The nightly runs of cron and Airflow: a second run of a day adds nothing, and refuses a row of another day."""

import json
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import jinja2
import pytest

from tests.integration.cli.command_lines import Outcome, run_here
from tests.spark.entries import DAY_MS, check, joined, messages, states, total, write_parquet

_DEPLOY = Path(__file__).parents[2] / "deploy"


def cron_script() -> str:
    """Return the crontab's one command as cron passes it to the shell."""
    [line] = re.findall(
        r"^[\d*]\S* \S+ \S+ \S+ \S+ +tiered-index +(.*)$", (_DEPLOY / "cron/tiered-index").read_text(), re.M
    )
    assert not re.search(r"(?<!\\)%", line)  # cron ends a command at an unescaped %
    return str(line.replace("\\%", "%"))


def airflow_script() -> str:
    """Return the commands of the DAG in order, as Airflow renders them for a run of 2026-11-21."""
    tasks: list[Any] = []

    class Bash:
        """Replaces Airflow's `BashOperator`."""

        def __init__(self, task_id: str, bash_command: str) -> None:
            self.bash_command = bash_command

        def __rshift__(self, other: Any) -> Any:
            tasks.extend(task for task in (self, other) if task not in tasks)
            return other

    dag = MagicMock()
    offered = {
        "airflow.sdk": {"DAG": dag},
        "airflow.providers.standard.operators.bash": {"BashOperator": Bash},
        "airflow.timetables.interval": {"CronDataIntervalTimetable": MagicMock()},
    }
    file = _DEPLOY / "airflow/tiered_index_daily.py"
    with pytest.MonkeyPatch.context() as patch:
        for name, members in offered.items():
            patch.setitem(sys.modules, name, SimpleNamespace(**members))
        exec(compile(file.read_text(), str(file), "exec"), {})
    assert dag.call_args.kwargs["max_active_runs"] == 1
    templates = jinja2.Environment(undefined=jinja2.StrictUndefined)
    templates.filters["ds"] = "{:%Y-%m-%d}".format
    begin = datetime(2026, 11, 21, 1, 17, tzinfo=UTC)
    return " && ".join(templates.from_string(task.bash_command).render(data_interval_start=begin) for task in tasks)


@pytest.mark.parametrize("script", [cron_script, pytest.param(airflow_script, marks=pytest.mark.long)])
def test_a_second_run_of_a_day_adds_nothing(script: Any, spark: Any, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/index"
    commands = _commands(script().replace("s3://BUCKET", f"file://{tmp_path}"), tmp_path)
    assert [command[0] for command in commands] == ["spark", "orphans"] and all(
        "--json" in command for command in commands
    )
    folder = Path(commands[0][commands[0].index("--source") + 1].removeprefix("file://"))
    day = datetime.strptime(folder.name, "day=%Y-%m-%d").replace(tzinfo=UTC)
    of_day = messages(200, days=1, begin_ms=round(day.timestamp()) * 1000)
    before = messages(50, days=1, seed=2, begin_ms=round(day.timestamp()) * 1000 - DAY_MS)
    folder.mkdir(parents=True)
    write_parquet(of_day, folder / "1.parquet")
    for removed in (0, 1):
        built, swept = (answered(command).document for command in commands)
        assert (built["entries"], built["removed_objects"] > 0) == (200, bool(removed)) and swept["status"] == "deleted"
        assert total(uri) == 200
        check(uri, of_day, keys=3)
    # the next run adds late messages
    more = messages(10, days=1, seed=3, begin_ms=round(day.timestamp()) * 1000)
    write_parquet(more, folder / "2.parquet")
    answered(commands[0])
    check(uri, joined([of_day, more]), keys=3)
    number = states(uri).number
    write_parquet(before, folder / "3.parquet")
    assert "outside of begin and end" in answered(commands[0], code=2).err
    assert (total(uri), states(uri).number) == (210, number)


def answered(command: list[str], code: int = 0) -> Outcome:
    outcome = run_here(*command)
    assert outcome.code == code, outcome
    return outcome


def test_the_page_shows_the_same_commands() -> None:
    page = (_DEPLOY.parent / "docs/spark-cluster.md").read_text().split("## On a schedule")[1]
    [shown] = re.findall(r"^```sh\n(tiered-index spark build.*?)\n```", page, re.MULTILINE | re.DOTALL)
    run_by_airflow = airflow_script().replace("BUCKET", "bucket").replace(" --json", "").replace(" --quiet", "")
    assert shown.splitlines() == run_by_airflow.split(" && ")


def _commands(script: str, folder: Path) -> list[list[str]]:
    """Return the arguments of each call of tiered-index in a shell script."""
    (folder / "bin").mkdir()
    stand_in, calls = folder / "bin/tiered-index", folder / "calls"
    tell = "import json, sys; print(json.dumps(sys.argv[1:]))"
    stand_in.write_text(f"#!/bin/sh\nexec '{sys.executable}' -c '{tell}' \"$@\" >> '{calls}'\n")
    stand_in.chmod(0o755)
    path = {"PATH": f"{folder}/bin:/usr/bin:/bin"}
    subprocess.run(["bash", "-euo", "pipefail", "-c", script], env=path, check=True, timeout=60)
    return [json.loads(line) for line in calls.read_text().splitlines()]
