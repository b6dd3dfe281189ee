"""A job plans again while others are faster, as often as its bound says, and leaves no object without a record."""

import pytest

from tests.support.merging import BASE_MS, DAY_S
from tiered_index.base.retention import Retention
from tiered_index.errors import CorruptFile, RootBehind, StorageBehind, StorageUnavailable
from tiered_index.service.jobs.orphans import sweep
from tiered_index.service.jobs.rewriting.job import InputsLost, Job, JobOvertaken, in_threads
from tiered_index.service.jobs.rewriting.merge_plan import plan_merge, plan_rewrite
from tiered_index.service.log.publication import JobOverdue


@pytest.fixture
def life(merging):
    """Two finished days, with three files each."""
    life = merging()
    life.fill(2)
    return life


def merging_job(life, workers=None, **more):
    def planned(state, lost):
        return plan_merge(state, life.options(DAY_S), now_s=life.clock.now_ms() // 1000, lost=lost).rewrites

    return Job(life.log(), planned, workers or in_threads(life.storage, life.clock, 1), **more)


def data(life):
    return {info.name for info in life.storage.list("data/")}


def test_it_gives_up_after_ten_plans_that_others_overtook(life):
    before, rewrites = life.state.number, []

    def overtaken(rewrite):
        rewrites.append(rewrite)
        raise JobOvertaken("another job was faster")

    with pytest.raises(JobOvertaken, match="10 times in a row"):
        merging_job(life, overtaken).run()
    assert (len(rewrites), life.state.number) == (20, before)


def test_a_job_that_repeats_takes_what_was_published_meanwhile(life):
    run, late = in_threads(life.storage, life.clock, 1), []

    def planned(state, lost):
        return plan_rewrite(state, {stored.name for stored in state.files.values()}, lost=lost)

    def workers(rewrite):
        if not late:
            late.append(rewrite)
            life.put([(BASE_MS, "late")])
            life.publish()
        return run(rewrite)

    for repeats, files in ((False, 1), (True, 0)):
        late.clear()
        Job(life.log(), planned, workers, repeats=repeats).run()
        assert len(life.state.files) == files
    life.check()


def test_it_plans_again_only_what_others_left(life):
    run, others = in_threads(life.storage, life.clock, 1), []

    def workers(rewrite):
        results = run(rewrite)
        if not others:
            others.append(life.merge(end_s=rewrite.windows[0].begin_s + DAY_S))
        return results

    done = merging_job(life, workers).run()
    assert (others[0].jobs, [rewrite.entries for rewrite, _ in done]) == (1, [life.messages // 2])
    assert len(data(life)) == 6 + 2, "the overtaken rewrite deleted its objects"
    life.check()


def test_a_job_that_fails_or_was_held_up_for_a_day_leaves_no_object(life):
    """A sweep took the objects of the one that was held up."""
    before, number = data(life), life.state.number
    run = in_threads(life.storage, life.clock, 1)

    def failing(rewrite):
        for task in rewrite.tasks:
            yield task.run(life.storage, life.clock.now_ms())
        raise StorageUnavailable("the last task failed")

    def held_up(rewrite):
        results = run(rewrite)
        life.clock.advance(86_500)
        sweep(life.storage, life.log(), Retention().grace_s)
        return results

    with pytest.raises(StorageUnavailable, match="last task"):
        merging_job(life, failing).run()
    assert data(life) == before
    with pytest.raises(JobOverdue, match=r"24\.0 hours ago"):
        merging_job(life, held_up).run()
    assert (data(life), life.state.number) == (before, number)


def test_a_lost_input_is_named_or_left(life):
    gone, *_ = life.state.objects
    life.storage.delete_many([gone])
    with pytest.raises(InputsLost, match="--skip-lost") as caught:
        merging_job(life).run()
    assert caught.value.names == {gone}
    # the other window was merged before
    assert len(life.state.files) == 3
    done = merging_job(life, skips_lost=True).run()
    assert [len(rewrite.inputs) for rewrite, _ in done] == [2]
    assert [stored.name for stored in life.state.files.values()] == [gone]


def test_damage_leaves_no_other_rewrite_undone(life):
    """Also those that are planned again without a lost object."""
    run, (gone, *_) = in_threads(life.storage, life.clock, 1), life.state.objects
    life.storage.delete_many([gone])
    tried = []

    def workers(rewrite):
        if all(named.name != gone for named in rewrite.inputs) and len(rewrite.inputs) == 3:
            tried.append(rewrite)
            raise CorruptFile(rewrite.inputs[0].name, "damaged")
        return run(rewrite)

    with pytest.raises(CorruptFile, match="damaged"):
        merging_job(life, workers, skips_lost=True, repeats=True).run()
    assert len(tried) == 1 and len(life.state.files) == 1 + 3


@pytest.mark.parametrize("error", [StorageBehind, RootBehind])
def test_a_storage_that_went_back_ends_a_job_at_once(life, error):
    tried = []

    def workers(rewrite):
        tried.append(rewrite)
        raise error("log", "it went back")

    with pytest.raises(error):
        merging_job(life, workers).run()
    assert len(tried) == 1
