"""A DAG of Airflow 3: each night the messages of the day before become a table, and what crashes left is swept.

Each command may be run again, by a retry or by `airflow backfill`: a day's table is replaced by itself in one record of
the log. On a cluster put `deploy/spark/submit.sh --master yarn --` in the place of `tiered-index spark`. Credentials
are the worker's own, by the usual AWS chain; none stand here.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable

MESSAGES = "s3://BUCKET/messages"
STORAGE = "s3://BUCKET/index"

with DAG(
    dag_id="tiered_index_daily",
    # by a bare text of cron a run's date would be the day that has just begun
    schedule=CronDataIntervalTimetable("17 1 * * *", timezone="UTC"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=True,
    # of two builds of one day at once the later one would replace the other
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=10)},
) as dag:
    # a row of another day is an error: its day's table would be replaced by that row
    build = BashOperator(
        task_id="build",
        bash_command=(
            "tiered-index spark build --json --quiet --mode replace --window 1d --max-windows 1"
            f" --source {MESSAGES}/day={{{{ data_interval_start | ds }}}} --storage {STORAGE}"
        ),
    )
    orphans = BashOperator(
        task_id="orphans", bash_command=f"tiered-index orphans --json --older-than 2d --yes --storage {STORAGE}"
    )
    build >> orphans
