"""Fault: a time range finds only the files that begin inside it.

RocketMQ #9233, #10268, #10269; golden fault 1.
RocketMQ: `queryAsync` read the files whose begin time was in the range. So a range inside a file found nothing, and one
that began in the middle of a file missed that file: 0 of 10 entries, 60 of 79.
Here: every file whose interval overlaps the range is searched, in any state, and no other.
"""

from __future__ import annotations

import itertools

from tests.support.model import Answer

T = 1_700_000_000_000


def test_the_lookups_that_java_answered_short(make_life, golden):
    """Java's own entries and lookups.

    Its ranges are in milliseconds, its stored times in whole seconds, so the test rounds a begin up to a second.
    """
    life = make_life(slots=32, items=201)
    for line in golden("tiered_service/input.jsonl"):
        life.put_call({**line, "keys": line["key"]})
    queries = golden("tiered_service/queries.jsonl")
    short = [query for query in queries if query["missed"]]
    assert len(short) == 32
    whole = {(q["key"], q["begin"], q["end"]): q for q in queries if q["phase"] == "uploaded" and q["maxCount"] == 1000}
    assert len(whole) == 27
    for state in life.through():
        assert len(life.service.files()) == (0 if state == "buffered" else 4)
        for (key, begin_ms, end_ms), query in whole.items():
            answers = life.check(query["topic"], key, -(-begin_ms // 1000) * 1000, end_ms, 1000)
            known = {(item[0], item[2], item[3]) for item in query["allFilesResult"]}
            assert {(answer.key_hash, answer.queue_id, answer.offset) for answer in answers} == known
            assert len(answers) == query["trueCountAllFiles"]


def test_every_window_at_the_edges_of_files(make_life):
    """Four files: a long one, one inside it, one across its end, one apart."""
    life = make_life(items=4)
    spans = [(0, 50, 100), (40, 45, 60), (90, 110, 130), (200, 201, 202)]
    for offset, second in enumerate(itertools.chain.from_iterable(spans)):
        life.put("t", 0, "k", offset, timestamp_ms=T + second * 1000)
    edges = sorted({edge for begin, _, end in spans for edge in (begin, end)})
    windows = [
        *itertools.combinations(edges, 2),
        *((edge + step, edge + step) for edge in edges for step in (-1, 0, 1)),
    ]
    for state in life.through():
        if state != "buffered":
            intervals = [(file.second_min * 1000 - T, file.second_max * 1000 - T) for file in life.service.files()]
            assert intervals == [(begin * 1000, end * 1000) for begin, _, end in spans]
        for begin, end in windows:
            window = (T + begin * 1000, T + end * 1000 + 999)
            life.check("t", "k", *window)
            reports = life.service.query("t", "k", *window).explain.files
            assert all(report.begin_ms <= window[1] and report.end_ms >= window[0] for report in reports)


def test_a_window_inside_one_second_of_one_file(life):
    for offset in range(10):
        life.put("t", 0, "k", offset, timestamp_ms=T + offset * 1000 + 700)
    for _ in life.through():
        # the resolution is one second: a range of any part of a second finds its entries
        assert life.check("t", "k", T + 5_100, T + 5_200) == [
            Answer("t", 0, 5, 10, T + 5_000, life.model.query("t", "k")[0].key_hash)
        ]
