"""Defects of the server of RocketMQ's remoting protocol."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

__all__ = ["MUTANTS"]

FRAMES = "tests/rocketmq/test_remoting_frames.py"
ANSWERS = "tests/rocketmq/test_remoting_answers.py"
SERVER = "tests/rocketmq/test_remoting_server.py"

MUTANTS = (
    Mutant(
        "remoting-wrong-opaque",
        "a response carries another opaque than its request, so that another caller gets it",
        "rocketmq/remoting/frames.py",
        "opaque=self.opaque,",
        "opaque=self.opaque + 1,",
        (f"{SERVER}::test_responses_come_as_they_are_ready_each_with_its_opaque",),
    ),
    Mutant(
        "remoting-short-body",
        "an answer has the first message only",
        "rocketmq/remoting/broker.py",
        "message.encode() for message in messages]",
        "message.encode() for message in messages[:1]]",
        (f"{ANSWERS}::test_recorded_requests_get_the_recorded_responses",),
    ),
    Mutant(
        "remoting-length-without-body",
        "the length of a frame leaves its body out",
        "rocketmq/remoting/frames.py",
        "length = _HEAD_BYTES + len(header) + len(command.body)",
        "length = _HEAD_BYTES + len(header)",
        (f"{FRAMES}::test_golden_responses_are_written_byte_for_byte",),
    ),
    Mutant(
        "remoting-write-not-refused",
        "what writes is called unknown instead of not permitted",
        "rocketmq/remoting/broker.py",
        "if request.code in _WRITES:",
        "if request.code in ():",
        (f"{ANSWERS}::test_nothing_is_written_and_what_is_unknown_says_so",),
    ),
    Mutant(
        "remoting-signature-unchecked",
        "who names a key is taken for its holder",
        "rocketmq/remoting/frames.py",
        "return key if is_signed else None",
        "return key",
        (f"{FRAMES}::test_golden_signatures",),
    ),
    Mutant(
        "remoting-body-not-signed",
        "the body of a signed request can be exchanged",
        "rocketmq/remoting/frames.py",
        "content + command.body",
        "content",
        (f"{FRAMES}::test_golden_signatures",),
    ),
    Mutant(
        "remoting-route-of-any-topic",
        "a key sees the route of topics that it is not for",
        "rocketmq/remoting/broker.py",
        "if not asker.sees(topic) or topic not in",
        "if topic not in",
        (f"{ANSWERS}::test_a_key_sees_its_topics_only",),
    ),
    Mutant(
        "remoting-place-of-any-topic",
        "a key sees a message of another topic by its offset",
        "rocketmq/remoting/broker.py",
        "for message in self._at(offset) if asker.sees(message.topic)]",
        "for message in self._at(offset)]",
        (f"{ANSWERS}::test_a_key_sees_its_topics_only",),
    ),
    Mutant(
        "remoting-frame-unbounded",
        "a length that lies is waited for",
        "rocketmq/remoting/server.py",
        "if not _LEAST_FRAME_BYTES <= length <= most:",
        "if length < _LEAST_FRAME_BYTES:",
        (f"{SERVER}::test_what_is_no_frame_ends_its_connection_alone",),
    ),
    Mutant(
        "remoting-requests-unbounded",
        "a client makes the server hold as many requests as it likes",
        "rocketmq/remoting/server.py",
        "if self._requests >= limits.requests or",
        "if",
        (f"{SERVER}::test_requests_of_all_are_bounded",),
    ),
    Mutant(
        "remoting-oneway-answered",
        "a request that nobody waits for is answered",
        "rocketmq/remoting/server.py",
        "if request.is_response or request.is_oneway:",
        "if request.is_response:",
        (f"{SERVER}::test_oneway_requests_and_responses_get_no_answer",),
    ),
    Mutant(
        "remoting-failure-as-no-message",
        "a storage that fails is told as no message",
        "rocketmq/remoting/broker.py",
        "return busy(request)\n        except TieredIndexError",
        "return request.answered(ResponseCode.QUERY_NOT_FOUND, _NO_MESSAGE)\n        except TieredIndexError",
        (f"{ANSWERS}::test_a_storage_that_fails_is_never_a_short_answer",),
    ),
    Mutant(
        "remoting-shortfall-untold",
        "an answer does not say that messages are left out",
        "rocketmq/remoting/broker.py",
        "remark = self._shortfall(topic, key, answer.messages)",
        "remark = None",
        (f"{ANSWERS}::test_every_key_of_a_deleted_store_comes_from_the_archive",),
    ),
    Mutant(
        "remoting-three-days-of-a-unique-key",
        "a unique key is looked for in the last three days, as tools ask",
        "rocketmq/remoting/broker.py",
        "begin_ms, wanted = 0, _MOST_OF_UNIQUE_KEY",
        "wanted = _MOST_OF_UNIQUE_KEY",
        (f"{ANSWERS}::test_a_unique_key_is_found_whenever_it_was_stored",),
    ),
    Mutant(
        "remoting-message-of-another-broker",
        "of several brokers' messages at one offset any one is given",
        "rocketmq/remoting/broker.py",
        "if len(found) == 1:",
        "if found:",
        (f"{ANSWERS}::test_one_offset_in_the_logs_of_several_brokers",),
    ),
    Mutant(
        "remoting-topic-denied",
        "a topic of a file that can't be read is said to be none",
        "rocketmq/remoting/broker.py",
        "elif wanted not in found:",
        "elif False:",
        (f"{ANSWERS}::test_topics_of_files_that_can_not_be_read_are_not_denied",),
    ),
    Mutant(
        "remoting-port-unguarded",
        "a service with tokens answers RocketMQ's tools of everybody",
        "server/remoting.py",
        "if guarded and self.keys is None:",
        "if False:",
        ("tests/server/test_remoting_port.py::test_it_lets_in_nobody_whom_the_service_would_not",),
    ),
)
