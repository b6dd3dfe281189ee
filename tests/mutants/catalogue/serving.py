"""Defects of the service over HTTP and of its client: who may ask, what is bounded, and what passes for a whole answer."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

GUARD = "tests/server/test_guard.py"
HTTP = "tests/server/test_http.py"
WRITING = "tests/server/test_writing.py"
CLIENT = "tests/server/test_client.py"
COMMAND = "tests/server/test_serve_command.py"
DEPLOY = "tests/server/test_deploy.py"

MUTANTS = (
    Mutant(
        "serve-every-topic",
        "a token sees topics that it is not for",
        "server/tokens.py",
        "return self.topics is None or topic.startswith(self.topics)",
        "return True",
        (f"{GUARD}::test_a_token_sees_its_topics_only",),
    ),
    Mutant(
        "serve-roles-alike",
        "every token may write and verify",
        "server/tokens.py",
        "if ROLES.index(self.role) < ROLES.index(role):",
        "if False:",
        (f"{WRITING}::test_only_writers_write_and_only_admins_verify",),
    ),
    Mutant(
        "serve-any-name",
        "a web page asks a service without tokens by a name of its own",
        "server/gate.py",
        "if self._hosts is not None and name not in self._hosts:",
        "if False:",
        (f"{GUARD}::test_without_tokens_only_its_own_address_is_answered",),
    ),
    Mutant(
        "serve-everybody",
        "other hosts are let in without tokens",
        "cli/serve.py",
        "if not is_local(host) and tokens is None and not insecure:",
        "if False:",
        (f"{COMMAND}::test_what_is_unsafe_or_wrong_is_refused",),
    ),
    Mutant(
        "serve-for-nobody",
        "a lookup goes on for a client that has gone",
        "server/calls.py",
        "allowance.end()",
        "pass",
        (f"{GUARD}::test_a_client_that_goes_ends_its_lookup",),
    ),
    Mutant(
        "serve-other-key",
        "a key that is no UTF-8 is looked up as another one",
        "server/gate.py",
        "            _check_text(scope)\n",
        "",
        (f"{HTTP}::test_what_is_wrong_is_a_problem",),
    ),
    Mutant(
        "serve-slow-body",
        "a body may come as slowly as it likes",
        "server/gate.py",
        "until_s - time.monotonic())",
        "9999.0)",
        (f"{GUARD}::test_bodies_are_bounded_in_time_and_memory",),
    ),
    Mutant(
        "serve-unknown-lag",
        "a follower whose lag is not known counts as ready",
        "cli/serve.py",
        "if lag.seconds is None:",
        "if False:",
        (f"{COMMAND}::test_a_lag_that_is_not_known_is_no_readiness",),
    ),
    Mutant(
        "serve-tools-unseen",
        "lookups over RocketMQ's protocol are not in the audit log",
        "rocketmq/remoting/server.py",
        "if self._told is not None:",
        "if False:",
        ("tests/server/test_remoting_port.py::test_tools_ask_beside_http",),
    ),
    Mutant(
        "serve-bomb",
        "a small compressed body is decompressed whatever it comes to",
        "server/arrow_body.py",
        "total += length if declared == _AS_IT_IS else declared",
        "total += length",
        (f"{WRITING}::test_a_small_body_does_not_stand_for_a_large_one",),
    ),
    Mutant(
        "serve-shared-bomb",
        "one long text of a dictionary is copied into each cell, whatever that comes to",
        "server/arrow_body.py",
        "left -= sum(_shared_bytes(chunk) for chunk in table[name].chunks)",
        "pass",
        (f"{WRITING}::test_a_small_body_does_not_stand_for_a_large_one",),
    ),
    Mutant(
        "serve-endless-body",
        "a body whose length is not told is taken whatever its size",
        "server/gate.py",
        "if size > self._gate.body_bytes:",
        "if False:",
        (f"{HTTP}::test_a_wrong_body_is_a_problem",),
    ),
    Mutant(
        "serve-paths",
        "the folders of the service's host leave it",
        "server/app.py",
        "document = self.served.redaction.document(document)",
        "pass",
        (f"{HTTP}::test_topics_and_files_are_listed",),
    ),
    Mutant(
        "serve-broken-stream-whole",
        "a stream that broke off ends with a status",
        "server/lookups.py",
        'status = {"error": problem, "cursor": answer.cursor}',
        'status = {"error": problem, "cursor": answer.cursor, "status": "complete"}',
        (f"{CLIENT}::test_a_stream_that_breaks_within_says_why",),
    ),
    Mutant(
        "serve-taken-twice",
        "what was taken of a source is taken again",
        "server/entries.py",
        "position is not None and position <= known",
        "position is not None and position < known",
        (f"{WRITING}::test_a_source_is_taken_once",),
    ),
    Mutant(
        "serve-cost-unbounded",
        "max_cost_usd bounds nothing",
        "storage/metering.py",
        "if cost_usd > self.max_cost_usd:",
        "if False:",
        (f"{GUARD}::test_a_cost_bounds_requests",),
    ),
    Mutant(
        "client-part-for-whole",
        "a stream without its last line passes for a whole answer",
        "client/client.py",
        "if status is None:",
        "if False:",
        (f"{CLIENT}::test_a_stream_without_its_end_is_no_answer",),
    ),
    Mutant(
        "client-puts-twice",
        "entries without a position are sent again",
        "client/client.py",
        "total=self._tries - 1 if repeatable else 0,",
        "total=self._tries - 1,",
        (f"{CLIENT}::test_a_put_without_a_position_is_sent_once",),
    ),
    Mutant(
        "serve-metric-renamed",
        "a metric that alerts ask for is called otherwise, and they never come",
        "server/metrics.py",
        '"unpublished_files": (',
        '"files_unpublished": (',
        (f"{DEPLOY}::test_alerts_and_panels_ask_for_what_is_exported",),
    ),
    Mutant(
        "serve-probe-moved",
        "what a probe asks for is not there",
        "server/openapi.py",
        'add("GET", "/readyz",',
        'add("GET", "/ready",',
        (f"{DEPLOY}::test_probes_and_scrapes_ask_for_routes_on_the_port_that_is_served",),
    ),
)
