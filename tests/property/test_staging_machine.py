"""Compaction by jobs between everything else that may be done to an index: answers are the model's, and no entry is
there twice.

As `test_merging_machine`, with a writer that stages its files and jobs that compact them, some of which are late, fail
at any call or die.
"""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from tests.property.index_machine import works
from tests.property.test_merging_machine import MergingMachine
from tests.support.disk_faults import SimulatedCrash
from tests.support.staging import Job
from tiered_index.errors import StorageError


class StagingMachine(MergingMachine):
    """`late` is a job that has sent its objects and not yet published them."""

    def __init__(self) -> None:
        super().__init__()
        self.late: Job | None = None

    def open(self) -> None:
        self.settings.update(compaction="spark", compact_timeout_s=200, refresh_interval_s=0)
        super().open()

    @rule(name=works)
    def go_on(self, name: str) -> None:
        """As the base's; but a ticket that is found again may be so old that the second round compacts its file."""
        self.work(name)

    @rule()
    def a_job_compacts(self) -> None:
        job = Job(self.storage, self.clock)
        published = job.run()
        assert not any(result.corrupt for result in (*job.left, *job.results))
        assert len(published) == len(job.tickets)
        self.check_all(self.service.query, self.model)

    @rule(run=st.booleans())
    def a_job_compacts_and_the_writer_adopts(self, run: bool) -> None:
        if run:
            self.work("seal_and_run")
        self.a_job_compacts()
        self.service.run_lifecycle()

    @rule()
    def a_job_is_late(self) -> None:
        self.late = Job(self.storage, self.clock).look().compact()

    @rule()
    def the_late_job_publishes(self) -> None:
        job, self.late = self.late, None
        if job is not None:
            with contextlib.suppress(StorageError):  # what it sent may have been swept
                job.publish()

    @rule(nth=st.integers(1, 12), times=st.sampled_from([1, None]), after=st.booleans(), dies=st.booleans())
    def a_job_in_trouble(self, nth: int, times: int | None, after: bool, dies: bool) -> None:
        more = {"error": SimulatedCrash} if dies else {}
        self.storage.fail("*", nth=nth, times=times, when="after" if after else "before", **more)
        with contextlib.suppress(StorageError, SimulatedCrash):
            Job(self.storage, self.clock).run()
        self.storage.clear()

    def sweep(self) -> None:
        """As the base's, but not below a job that is under way: `orphans` has its age guard for that."""
        self.late = None
        super().sweep()


@pytest.mark.parametrize(
    "examples", [pytest.param(12, id="short"), pytest.param(800, id="long", marks=pytest.mark.slow)]
)
def test_jobs_between_everything_else(examples: int) -> None:
    run_state_machine_as_test(
        StagingMachine, settings=settings(max_examples=examples, stateful_step_count=30, deadline=None)
    )
