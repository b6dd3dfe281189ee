"""The installed script and the module in separate processes: exit codes and streams equal those of other tests in this
process.
"""

from tests.integration.cli.command_lines import Outcome, run_here, run_script
from tiered_index import __version__


def test_processes_answer_as_this_one_does(original):
    query = ("query", "orders", "k7", "--root", original.root, "--max", 5, "--json")
    done, here = run_script(*query), run_here(*query)
    assert (done.code, done.err) == (here.code, here.err) == (0, "")
    assert done.document["items"] == here.document["items"] != []
    altered = (*query, "--cursor", "AAAA")
    assert run_script(*altered, module="tiered_index.cli") == run_here(*altered)
    assert run_here(*altered).code == 2


def test_the_version():
    assert run_here("--version") == Outcome(0, f"tiered-index {__version__}\n", "")
