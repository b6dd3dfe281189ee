"""Commands start and close Spark's session without Java here.

The subjects are Ctrl-C during the start, Java's own output, versions, settings, and frames that are not Spark's.
"""

import logging
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pandas as pd
import pytest

from tiered_index.cli import on_spark as sharing
from tiered_index.cli.options import SparkOptions
from tiered_index.cli.output import Output
from tiered_index.cli.session import Session
from tiered_index.errors import ConfigError, InvalidArgument
from tiered_index.spark import session
from tiered_index.spark.frames import large_batches
from tiered_index.spark.lookup.keys import keys_of
from tiered_index.spark.versions import check_classic
from tiered_index.spark.writing.sources import column_of, has_log_offsets


def test_an_interrupt_waits_for_the_session(monkeypatch):
    number = signal.SIGINT
    root, before = logging.getLogger(), signal.getsignal(number)
    monkeypatch.setattr(root, "filters", [])
    done, said = [], Session(Output(as_json=False, quiet=True))

    def open_session(*_, **__):
        # to this thread, because the test's process has others that delay no signal
        signal.pthread_kill(threading.get_ident(), number)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # Spark also sets its own handler
        done.append(True)
        return SimpleNamespace(sparkContext=SimpleNamespace(setLogLevel=lambda _: None))

    monkeypatch.setattr(session, "open_session", open_session)
    with pytest.raises(KeyboardInterrupt):
        sharing.spark_of(said, SparkOptions())
    assert done and signal.getsignal(number) is before
    context = SimpleNamespace(setLogLevel=print, uiWebUrl=None, applicationId="local-1")
    spark = SimpleNamespace(sparkContext=context)
    monkeypatch.setattr(session, "open_session", lambda *_, **__: spark)
    sharing.spark_of(said, SparkOptions())
    record = logging.LogRecord("root", logging.ERROR, "/lib/py4j/java_gateway.py", 1, "KeyboardInterrupt", None, None)
    assert not root.filter(record)
    assert root.filter(logging.LogRecord("root", logging.ERROR, "/other.py", 1, "another", None, None))


def test_java_that_a_command_starts_writes_apart_unless_asked(capfd, monkeypatch):
    def started():
        subprocess.run([sys.executable, "-c", "import os; os.write(2, b'of Java\\n')"], check=True)

    with sharing.java_apart():
        started()
    assert capfd.readouterr().err == ""
    with pytest.raises(ConfigError), sharing.java_apart():
        started()
        raise ConfigError("it does not start")
    assert capfd.readouterr().err == "of Java\n"
    monkeypatch.setattr(logging.getLogger("tiered_index"), "level", logging.INFO)
    logging.getLogger("tiered_index").manager._clear_cache()
    with sharing.java_apart():
        started()
    assert capfd.readouterr().err == "of Java\n"


@pytest.mark.parametrize(("version", "old"), [("3.5.1", True), ("4.0.0.dev1", False), ("4.2.0", False), ("5.0", False)])
def test_a_version_that_is_too_old_is_said_before_a_stage_runs(version, old):
    with pytest.raises(ConfigError, match=f"Spark {version} is too old: .* needs 4.0") if old else nullcontext():
        check_classic(SimpleNamespace(version=version))


def test_jobs_side_by_side_leave_a_session_as_it_was():
    settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": "10000"}
    session = SimpleNamespace(conf=SimpleNamespace(get=settings.get, set=settings.__setitem__))
    first, second = large_batches(session), large_batches(session)
    first.__enter__()
    assert list(settings.values()) == ["131072"]
    second.__enter__()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert list(settings.values()) == ["10000"]


def test_a_frame_of_pandas_is_refused_by_name():
    frame = pd.DataFrame({"topic": ["t"], "key": ["k"]})
    with pytest.raises(InvalidArgument, match=r"not pandas.*DataFrame: make a DataFrame by spark.createDataFrame"):
        has_log_offsets(frame)
    with pytest.raises(InvalidArgument, match="the keys are a DataFrame of Spark, not pandas"):
        keys_of(frame, {}, ())
    twice = SimpleNamespace(columns=["key", "topic", "Key"])
    with pytest.raises(InvalidArgument, match="two columns 'key'"):
        column_of(twice, "key", "key", "the source has")
