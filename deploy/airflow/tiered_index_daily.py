"""A DAG for Airflow 3. Each night it builds a table of the messages of the day before, and deletes orphans.

You can repeat each command, by a retry or by `airflow backfill`: one log record replaces the day's table. On a cluster,
replace `tiered-index spark` by `deploy/spark/submit.sh --master yarn --`. The worker finds its credentials by AWS's
usual chain.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG
from airflow.timetables.interval import CronDataIntervalTimetable

MESSAGES = "s3://BUCKET/messages"
STORAGE = "s3://BUCKET/index"
DAY = "{{ data_interval_start | ds }}"

with DAG(
    dag_id="tiered_index_daily",
    # with a plain cron text the run's date would be the day that has just begun
    schedule=CronDataIntervalTimetable("17 1 * * *", timezone="UTC"),
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    catchup=True,
    # two concurrent builds of one day would replace each other's table
    max_active_runs=1,
    default_args={"retries": 3, "retry_delay": timedelta(minutes=10)},
) as dag:
    # a row of another day is an error: it would replace the table of that day
    build = BashOperator(
        task_id="build",
        bash_command=(
            f"tiered-index spark build --json --quiet --mode replace --window 1d --begin {DAY} --end {DAY}"
            f" --source {MESSAGES}/day={DAY} --storage {STORAGE}"
        ),
    )
    orphans = BashOperator(
        task_id="orphans", bash_command=f"tiered-index orphans --json --older-than 2d --yes --storage {STORAGE}"
    )
    build >> orphans
