"""Defects of what the command line and lookups of messages may spend, and of what they say it cost."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

PAGES = "tests/unit/cli/test_spending.py"
TABLE = "tests/unit/cli/test_explaining.py"
QUERY = "tests/integration/cli/test_query_budgets.py"
MESSAGES = "tests/rocketmq/test_message_budgets.py"

MUTANTS = (
    Mutant(
        "bounds-anew-for-each-page",
        "each page of --all may spend as much as the whole command",
        "cli/explaining.py",
        "            self.budget.spend(answer.explain)\n",
        "",
        (f"{PAGES}::test_each_page_gets_what_the_ones_before_left",),
    ),
    Mutant(
        "spent-page-thrown-away",
        "what the last page found before the bound is lost",
        "cli/explaining.py",
        "error.result if isinstance(error.result, type(self.nothing)) else self.nothing",
        "self.nothing",
        (f"{PAGES}::test_what_was_found_is_the_last_page_and_the_error_comes_after_it",),
    ),
    Mutant(
        "spent-command-exits-0",
        "a command whose bounds were too small says that all is well",
        "cli/explaining.py",
        "            raise self.exceeded\n",
        "            return 0\n",
        (f"{PAGES}::test_what_was_found_is_the_last_page_and_the_error_comes_after_it",),
    ),
    Mutant(
        "time-without-the-opening",
        "opening an index may take longer than --timeout",
        "cli/explaining.py",
        "with self.budget.clock():",
        "if True:",
        (f"{PAGES}::test_the_time_covers_the_opening_and_never_becomes_none",),
    ),
    Mutant(
        "spent-files-unnamed",
        "an error of a bound doesn't say which files were not read",
        "cli/session.py",
        "if isinstance(error, BudgetExceeded):",
        "if False:",
        (f"{QUERY}::test_people_see_what_was_found_then_the_error_and_the_files_that_were_not_read",),
    ),
    Mutant(
        "several-storages-one-read",
        "of several storages a command quietly reads the first",
        "cli/session.py",
        "        if len(self.storages) > 1:\n",
        "        if False:\n",
        (f"{QUERY}::test_other_commands_read_one_index[files]",),
    ),
    Mutant(
        "explain-drops-given-up-reads",
        "the table leaves out what searches cost that were given up",
        "cli/explaining.py",
        "[replace(_sum(same), file=",
        "[replace(same[0], requests=0, file=",
        (f"{TABLE}::test_the_columns_add_up_to_the_totals[False]",),
    ),
    Mutant(
        "explain-of-one-page",
        "the table shows one page's costs of a file",
        "cli/explaining.py",
        """
            _sum([replace(same[0], place=place, outcome=outcome), *same[1:]])
            for (place, outcome), same in of_kind.items()
        """,
        "_sum([replace(same[0], place=place, outcome=outcome)]) for (place, outcome), same in of_kind.items()",
        (f"{TABLE}::test_pages_are_shown_together",),
    ),
    Mutant(
        "messages-beyond-the-budget",
        "archived messages are read whatever a lookup may spend",
        "service/lookup/lookups.py",
        "with LookupBudget(self._prices, LookupLimits(max_requests, max_bytes, timeout_s)).open() as budget:",
        "with LookupBudget(self._prices, LookupLimits()).open() as budget:",
        (f"{MESSAGES}::test_every_limit_holds_for_index_and_messages_together",),
    ),
    Mutant(
        "messages-time-of-each-page",
        "each page of a lookup of messages has the whole time",
        "service/lookup/messages.py",
        '{} if left_s is None else {"timeout_s": max(left_s, _MOMENT_S)}',
        "{}",
        (f"{MESSAGES}::test_the_time_is_of_all_pages_together[False]",),
    ),
    Mutant(
        "messages-refused-but-complete",
        "an answer without the messages that the budget didn't reach passes for whole",
        "service/lookup/messages.py",
        "(exceeded := self.exceeded or self._refusal()) is None:",
        "(exceeded := self._exceeded) is None:",
        (f"{MESSAGES}::test_every_limit_holds_for_index_and_messages_together",),
    ),
    Mutant(
        "messages-refused-are-charged",
        "a request that the budget refused counts as made",
        "rocketmq/archive/messages.py",
        "        search.requests -= 1\n",
        "        pass\n",
        (f"{MESSAGES}::test_every_limit_holds_for_index_and_messages_together",),
    ),
)
