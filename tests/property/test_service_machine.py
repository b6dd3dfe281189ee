"""Whatever the steps on an index, the backend and the reader, the answers equal the reference model's. See
`index_machine`.
"""

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.property import places
from tests.property.index_machine import CACHES, HOT
from tests.property.rules_of_faults import StruckMachine
from tests.property.rules_of_readers import PLAIN, SOURCED

BACKENDS = ("memory", "file", "sqlite", "s3")
EXAMPLES = {"memory": 20, "file": 2, "sqlite": 2, "s3": 1}
LONG = {"memory": 3000, "file": 1000, "sqlite": 300, "s3": 100}


@pytest.fixture
def machine(request):
    backend = request.param
    if backend != "s3":
        yield type(f"On{backend.title()}", (StruckMachine,), {"place": staticmethod(getattr(places, backend))})
        return
    server = request.getfixturevalue("s3_environment")
    yield type("OnS3", (StruckMachine,), {"place": staticmethod(places.s3(server))})


@pytest.mark.parametrize("machine", BACKENDS, indirect=True)
def test_an_index_answers_as_the_model_does(machine, request):
    backend = request.node.callspec.params["machine"]
    run_state_machine_as_test(machine, settings=settings(max_examples=EXAMPLES[backend], stateful_step_count=30))


@pytest.mark.parametrize("machine", BACKENDS, indirect=True)
def test_every_way_to_ask_is_met_on_every_backend(machine):
    """Each reader's cursors, partial answers and refreshes, of one index and several, whatever the steps were."""
    statuses = set()

    class Watched(machine):
        def check_partial(self, who, result, *question):
            statuses.add((who, result.status))
            super().check_partial(who, result, *question)

    # a request to S3 is slow: one reader of one index and one of several
    alone, several = (("caching",), ("two",)) if machine.__name__ == "OnS3" else (PLAIN, SOURCED)
    everybody, hot = alone + several, {"topic": HOT[0], "key": HOT[1], "limits": (None, None)}
    state = Watched()
    try:
        state.create(preset="native", slots=7, items=40, keep_s=0, checkpoint_every=3, caches=CACHES[1], seeds=[0])
        # cursors, across a publication and a replaced object that some readers have not read about
        for sourced, group in ((False, PLAIN), (True, SOURCED)):
            place = state.begin_paging(who=group[-1], many=False, **hot)
            for step in range(6):
                assert place[0] is sourced and place[4] is not None
                if step == 3:
                    state.some_more_is_published(seed=4)
                    state.an_object_is_replaced(which=step, keep=False)
                place = state.next_page(place=place, which=step % 4, count=1, many=step % 3 == 2)
        # refreshes: by a call, and by interval
        for refresh in (state.ask_a_reader_to_refresh, None):
            state.some_more_is_published(seed=5)
            state.advance(seconds=25)
            for who in everybody:
                if refresh is not None:
                    refresh(who=who)
                state.ask_somebody(who=who, count=64, many=False, **hot)
                if who != "service":
                    assert state.index(who)._views[-1].log_state.number == state.service.log_state.number
        # partial answers: bounds, a missing object, a failing storage, a damaged log
        for who in everybody:
            bounds = {"max_requests": 1, "max_bytes": None, "timeout_s": None, "later_s": 0}
            state.ask_within_bounds(who=who, count=64, many=False, partial=True, **bounds, **hot)
            assert (who, "partial") in statuses
            statuses.clear()
            for which in range(len(state.service.log_state.objects)):
                if (who, "partial") not in statuses:  # an object with entries of the lookup
                    state.ask_while_an_object_is_lost(who=who, count=64, many=False, partial=True, which=which, **hot)
            assert (who, "partial") in statuses
            statuses.clear()
        for who in alone:
            state.some_more_is_published(seed=6)
            for trouble in ("log", "fail", "wrong"):
                arguments = {"who": who, "count": 64, "many": False, "partial": True, **hot}
                state.ask_a_storage_in_trouble(nth=1, times=None, trouble=trouble, **arguments)
                # a writer knows its own log
                assert statuses == {(who, "complete" if (who, trouble) == ("service", "log") else "partial")}
                statuses.clear()
        for who in ("caching", "two"):
            state.ask_for_everything(who=who)
    finally:
        state.teardown()


@pytest.mark.slow
@pytest.mark.parametrize("machine", BACKENDS, indirect=True)
def test_an_index_answers_as_the_model_does_for_long(machine, request):
    backend = request.node.callspec.params["machine"]
    chosen = settings(max_examples=LONG[backend], stateful_step_count=60, derandomize=False)
    run_state_machine_as_test(machine, settings=chosen)
