"""Starting a `job` in a process of its own and taking what it tells. One thread."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tiered_index.cli.bench.spark.job import Job

__all__ = ["run_process"]

_TOLD_OF_FAILURE = 4_000


def run_process(job: Job, environment: dict[str, str], told: Callable[[str, dict[str, Any]], None]) -> None:
    """Run a job; call `told` with the name and the values of each measurement as it comes. Raises `RuntimeError` where
    the job fails.
    """
    document = Path(job.folder) / "job.json"
    document.write_text(json.dumps(asdict(job)))
    complaints = Path(job.folder) / "job.log"
    with complaints.open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tiered_index.cli.bench.spark.job", str(document)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=job.folder,
            env={**os.environ, "TMPDIR": job.folder, **environment},
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                values = json.loads(line)
                told(values.pop("name"), values)
            status = process.wait()
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
            process.stdout.close()
    if status:
        raise RuntimeError(
            f"the Spark job on {job.master} ended with status {status}: {complaints.read_text()[-_TOLD_OF_FAILURE:]}"
        )
