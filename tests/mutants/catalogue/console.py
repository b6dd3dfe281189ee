"""Defects of the console: what it hides, what it takes for HTML, what it keeps, and how its files are sent."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

SEARCH = "tests/server/console/test_search.py"
VIEWS = "tests/server/console/test_views.py"
FILES = "tests/server/console/test_files.py"

MUTANTS = (
    Mutant(
        "console-texts-as-html",
        "what an index holds is read as HTML",
        "server/console/page.js",
        "made.append(...children.filter((child) => child !== null && child !== undefined));",
        "for (const child of children) child?.nodeType ? made.append(child) : (made.innerHTML += child ?? '');",
        (f"{SEARCH}::test_what_an_index_holds_is_never_html",),
    ),
    Mutant(
        "console-inline-scripts",
        "the policy lets inline scripts run",
        "server/console/__init__.py",
        "script-src 'self';",
        "script-src 'self' 'unsafe-inline';",
        (f"{FILES}::test_the_page_needs_no_token_and_has_a_strict_policy",),
    ),
    Mutant(
        "console-old-files",
        "who has any version of a file is told that it is the present one",
        "server/console/__init__.py",
        'if file.etag in request.headers.get("if-none-match", ""):',
        'if request.headers.get("if-none-match", ""):',
        (f"{FILES}::test_what_was_seen_already_is_not_sent_again",),
    ),
    Mutant(
        "console-token-stays",
        "a token outlives its tab",
        "server/console/api.js",
        "set: (text) => sessionStorage.setItem(TOKEN, text),",
        "set: (text) => [sessionStorage, localStorage].forEach((one) => one.setItem(TOKEN, text)),",
        (f"{VIEWS}::test_a_token_is_asked_for_refused_and_kept_by_the_tab",),
    ),
    Mutant(
        "console-token-in-address",
        "a token that came in the address stays there",
        "server/console/main.js",
        "if (given !== undefined) history.replaceState",
        "if (given === null) history.replaceState",
        (f"{VIEWS}::test_a_token_is_asked_for_refused_and_kept_by_the_tab",),
    ),
    Mutant(
        "console-refusal-unsaid",
        "why a token was refused is taken back by the next request, which has none",
        "server/console/main.js",
        'if (!refused && !find("token-view").hidden) return;',
        "",
        (f"{VIEWS}::test_a_token_is_asked_for_refused_and_kept_by_the_tab",),
    ),
    Mutant(
        "console-entries-twice",
        "entries of a stream that broke off are shown again with the repeated one",
        "server/console/search.js",
        "items.length = known;",
        "",
        (f"{SEARCH}::test_a_stream_that_breaks_off_is_no_whole_answer",),
    ),
    Mutant(
        "console-partial-unnamed",
        "a partial answer does not say what it lacks",
        "server/console/search.js",
        'warn("This answer is partial: these files could not be read", end.failed);',
        "",
        (f"{SEARCH}::test_a_partial_answer_names_what_it_lacks",),
    ),
    Mutant(
        "console-expired-untold",
        "an empty answer does not say what has expired",
        "server/console/search.js",
        "if (expired !== null) notes.push",
        "if (expired < 0) notes.push",
        (f"{SEARCH}::test_no_match_says_what_was_looked_at_and_what_has_expired",),
    ),
    Mutant(
        "console-every-row",
        "all rows of a table are in the document at once",
        "server/console/page.js",
        ".slice(first, first + ROWS).map((row)",
        ".map((row)",
        (f"{VIEWS}::test_ten_thousand_files_stay_a_page_of_rows",),
    ),
    Mutant(
        "console-rounded-numbers",
        "numbers of a JSON body lose digits",
        "server/console/message.js",
        "forms.JSON = () => indented(text);",
        "forms.JSON = () => JSON.stringify(JSON.parse(text), null, 2);",
        (f"{SEARCH}::test_a_message_is_shown_as_text_json_or_digits",),
    ),
    Mutant(
        "console-deep-json",
        "a body of many brackets is indented until no text can hold it",
        "server/console/message.js",
        "Math.min(depth, DEEPEST)",
        "depth",
        (f"{SEARCH}::test_a_message_is_shown_as_text_json_or_digits",),
    ),
    Mutant(
        "console-ready-while-gone",
        "the head says that the service is ready above what says that there is no answer",
        "server/console/main.js",
        'document.addEventListener("no-answer", health.ready);',
        "",
        (f"{SEARCH}::test_an_error_says_what_to_do_and_can_be_tried_again",),
    ),
    Mutant(
        "serve-costs-of-every-topic",
        "a token for some topics is told what others take and cost",
        "server/app.py",
        "seen = [topic is not None and caller.sees(topic) for",
        "seen = [True for",
        ("tests/server/test_guard.py::test_a_token_sees_its_topics_only",),
    ),
)
