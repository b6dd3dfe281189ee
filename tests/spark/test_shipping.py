"""Executors on a cluster of processes have the package's dependencies but not the package: the driver ships it."""

import json
import os
import signal
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from pyspark import cloudpickle
from pyspark.core.broadcast import Broadcast
from pyspark.serializers import CloudPickleSerializer

from tests.integration.cli.command_lines import TOP, run_here
from tests.spark.entries import check, messages, total, write_parquet
from tests.support.core import compiled_core
from tests.support.s3_server import CREDENTIALS
from tiered_index import IndexService
from tiered_index.base import kernels
from tiered_index.errors import NotAnIndex
from tiered_index.format.keys.bloom import filter_hash
from tiered_index.spark import build, merge
from tiered_index.spark.session import pack_package

_OURS = ("tiered_index", "__editable__")
SUBMIT = Path(__file__).parents[2] / "deploy/spark/submit.sh"


def bare_python(folder: Path) -> Path:
    """Return an interpreter that lacks only the package."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--symlinks", str(folder)], check=True)
    dependencies = folder / "dependencies"
    dependencies.mkdir()
    # also those of the virtualenv under this one
    places = dict.fromkeys(entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages"))
    for path in map(Path, places):
        for entry in path.iterdir():
            if not entry.name.startswith(_OURS) and entry.suffix != ".pth" and not (dependencies / entry.name).exists():
                (dependencies / entry.name).symlink_to(entry)
    (site,) = folder.glob("lib/python3*/site-packages")
    (site / "dependencies.pth").write_text(f"{dependencies}\n")
    return folder / "bin" / "python"


@pytest.mark.slow
def test_executors_get_the_package_from_the_driver(tmp_path):
    worker = bare_python(tmp_path / "bare")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"PYSPARK_PYTHON": str(worker), "SPARK_LOCAL_IP": "127.0.0.1"}
    script = "import numpy, pyarrow, boto3, msgspec, pyspark, importlib.util as u; print(u.find_spec('tiered_index'))"
    quiet = {"cwd": tmp_path, "env": environment, "capture_output": True, "text": True}
    answered = subprocess.run([worker, "-c", script], **quiet, check=True)
    assert answered.stdout.strip() == "None"
    table, storage = messages(800), f"file://{tmp_path}/storage"
    source = write_parquet(table, tmp_path / "m.parquet")

    cluster = "--master local-cluster[2,1,1024] --conf spark.executor.memory=1g --conf spark.ui.enabled=false"

    def run_on(line):
        command = [sys.executable, "-c", "from tiered_index.cli.main import run; run()", *line.split()]
        command += f"--storage {storage} {cluster} --conf spark.driver.host=127.0.0.1 --json --quiet".split()
        return subprocess.run(command, **quiet, timeout=400)

    build = f"spark build --source {source} --set slots=64"
    alone = run_on(build)
    assert alone.returncode != 0 and "No module named 'tiered_index'" in alone.stderr
    built = run_on(f"{build} --ship")
    assert built.returncode == 0, built.stderr[-3000:]
    assert json.loads(built.stdout)["entries"] == 800
    merged = run_on("merge --window 30d --ship")
    assert merged.returncode == 0, merged.stderr[-3000:]
    assert json.loads(merged.stdout)["tiers"][0]["entries"] == total(storage) == 800
    check(storage, table, keys=5)
    keys = table.select(["topic", "key"]).group_by(["topic", "key"]).aggregate([])
    pq.write_table(keys, tmp_path / "keys.parquet")
    looked_up = run_on(f"spark lookup --keys {tmp_path}/keys.parquet --max 1000 --out {tmp_path}/answers --ship")
    assert looked_up.returncode == 0, looked_up.stderr[-3000:]
    names = ["topic", "key", "offset"]
    answered, wanted = (side.select(names).to_pylist() for side in (pq.read_table(tmp_path / "answers"), table))
    assert sorted(map(str, answered)) == sorted(map(str, wanted))


@pytest.mark.slow
def test_executors_get_all_of_it_from_an_archive(tmp_path):
    """Spark unpacks it as with `submit.sh`; the driver has its own copy."""
    bare_python(tmp_path / "bare")
    (site,) = tmp_path.glob("bare/lib/python3*/site-packages")
    zipfile.ZipFile(pack_package(tmp_path / "package.zip")).extractall(site)
    with tarfile.open(tmp_path / "environment.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "bare", ".")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYSPARK_PYTHON")}
    environment |= {"PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    environment["TIERED_INDEX_ARCHIVE"] = f"{tmp_path}/environment.tar.gz"
    table, storage = messages(400), f"file://{tmp_path}/storage"
    source = write_parquet(table, tmp_path / "m.parquet")
    options = "--master local-cluster[2,1,1024] --conf spark.executor.memory=1g --conf spark.ui.enabled=false"
    options += f" --conf spark.driver.host=127.0.0.1 -- build --source {source} --set slots=64 --storage {storage}"
    command = ["bash", SUBMIT, *options.split(), "--json", "--quiet"]
    built = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=400)
    assert built.returncode == 0, built.stdout + built.stderr[-3000:]
    assert json.loads(built.stdout)["entries"] == total(storage) == 400
    check(storage, table, keys=5)


def test_the_shipped_archive_has_the_modules_and_the_same_bytes_each_time(tmp_path):
    first, second = pack_package(tmp_path / "1.zip"), pack_package(tmp_path / "2.zip")
    assert first.read_bytes() == second.read_bytes()
    names = zipfile.ZipFile(first).namelist()
    assert "tiered_index/__init__.py" in names and "tiered_index/spark/writing/build.py" in names
    assert all(name.startswith("tiered_index/") and name.endswith((".py", ".so")) for name in names)
    if kernels.compiled() is not None:
        assert {name.split(".")[0] for name in names if name.endswith(".so")} >= {
            "tiered_index/base/_core",
            "tiered_index/base/_views",
        }


def imported_from(package, tmp_path):
    """Return the place from which a process imports a package, whether it has the compiled core, and its warnings."""
    script = (
        f"import sys; sys.path[:0] = [{str(package)!r}]; "
        f"from tiered_index.spark.writing import shards; import tiered_index as t; print(t.__file__); "
        f"from tiered_index.base import kernels; from tiered_index.format.keys.bloom import filter_hash; "
        f"print(kernels.compiled() is not None, kernels.compiled_views() is not None, filter_hash(1, 2))"
    )
    ran = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    place, core = ran.stdout.splitlines()
    assert place == f"{package}/tiered_index/__init__.py", ran.stderr
    return core, ran.stderr


@pytest.mark.long
def test_executors_unpack_the_compiled_core_or_say_that_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "unpacked"))
    (tmp_path / "unpacked").mkdir()
    compiled_core()
    whole = pack_package(tmp_path / "whole.zip")
    assert imported_from(whole, tmp_path) == (f"True True {filter_hash(1, 2)}", "")
    assert not list((tmp_path / "unpacked").iterdir())
    with zipfile.ZipFile(whole) as package, zipfile.ZipFile(tmp_path / "others.zip", "w") as others:
        for name in package.namelist():
            others.writestr(name.replace(".so", "-of-another-system.so"), package.read(name))
    core, said = imported_from(tmp_path / "others.zip", tmp_path)
    assert core == f"False False {filter_hash(1, 2)}" and "has no tiered_index.base._core for this Python" in said
    with zipfile.ZipFile(whole) as package, zipfile.ZipFile(tmp_path / "damaged.zip", "w") as damaged:
        for name in package.namelist():
            damaged.writestr(name, b"no module" if name.endswith(".so") else package.read(name))
    core, said = imported_from(tmp_path / "damaged.zip", tmp_path)
    assert core == f"False False {filter_hash(1, 2)}" and "NumPy does its work" in said


def test_nothing_secret_is_handed_to_spark(spark, s3, config, tmp_path, monkeypatch):
    """No secret is in the descriptions of jobs, which Spark's pages show, either."""
    secret = "a-secret-of-the-driver-alone"
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", secret)
    monkeypatch.setenv("AWS_SESSION_TOKEN", secret)
    handed: list[bytes] = []
    pickled, sent = CloudPickleSerializer.dumps, Broadcast.dump

    def dumps(serializer, value):
        handed.append(pickled(serializer, value))
        return handed[-1]

    def dump(shared, value, file):
        handed.append(cloudpickle.dumps(value))
        return sent(shared, value, file)

    monkeypatch.setattr(CloudPickleSerializer, "dumps", dumps)
    monkeypatch.setattr(Broadcast, "dump", dump)
    uri = f"s3://{s3.new_bucket()}/index?endpoint_url={s3.endpoint_url}&addressing_style=path"
    context = spark.sparkContext
    store = context._jsc.sc().statusStore()
    before = store.jobsList(None).size()
    build(spark, write_parquet(messages(100), tmp_path / "m.parquet"), storage=uri, config=config)
    merge(spark, storage=uri, window="30d")
    # the tasks of both jobs receive the address
    assert sum(s3.endpoint_url.encode() in pickle for pickle in handed) >= 2
    assert not any(secret.encode() in pickle for pickle in handed)
    jobs = [jobs.apply(number) for jobs in [store.jobsList(None)] for number in range(jobs.size())]
    texts = [f"{job.name()} {job.description().toString()} {job.jobGroup().toString()}" for job in jobs]
    assert len(texts) >= before + 3 and all(job.description().isDefined() for job in jobs[: len(jobs) - before])
    settings = [value for _, value in context.getConf().getAll()]
    assert not any(secret in text or CREDENTIALS["AWS_SECRET_ACCESS_KEY"] in text for text in texts + settings)


@pytest.mark.parametrize(
    ("mode", "archive"),
    [
        ((), True),
        (("--deploy-mode", "client"), False),
        (("--deploy-mode", "cluster"), True),
        (("--conf", "spark.submit.deployMode=cluster"), False),
    ],
)
def test_the_driver_of_cluster_mode_has_the_interpreter_of_its_node(tmp_path, mode, archive):
    submit = tmp_path / "bin" / "spark-submit"
    submit.parent.mkdir()
    submit.write_text('#!/bin/sh\necho "$PYSPARK_DRIVER_PYTHON" "$PYSPARK_PYTHON"; echo "$@" >&2\n')
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {submit}\n")
    for path in (submit, python):
        path.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    environment |= {"TIERED_INDEX_ARCHIVE": "e.tar.gz"} if archive else {"PYSPARK_PYTHON": "/opt/python"}
    node = "./environment/bin/python" if archive else "/opt/python"
    for name, job in (("merge", "merge"), ("build", "spark build")):
        command = [SUBMIT, "--master", "yarn", *mode, "--", name]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert done.stderr.endswith(f"/job.py {job}\n")
        assert done.stdout.split() == [node if "cluster" in "".join(mode) else str(python), node]


@pytest.mark.parametrize(
    ("line", "environment", "is_on_spark"),
    [
        ("merge", {"PYSPARK_GATEWAY_PORT": "25333"}, True),
        *((f"merge {option}", {}, True) for option in ("--master yarn", "--conf spark.executor.cores=2", "--ship")),
        ("merge", {}, False),
        ("merge --dry-run --master yarn", {}, False),
    ],
)
def test_a_merge_runs_on_spark_with_a_master_and_under_spark_submit(
    line, environment, is_on_spark, tmp_path, monkeypatch
):
    with IndexService.open(root=tmp_path / "root", storage=(storage := f"file://{tmp_path}/storage")):
        pass
    merged = []
    monkeypatch.setattr("tiered_index.cli.keep.merge.merge_on_spark", lambda *arguments: merged.append(arguments[2][0]))
    done = run_here(*line.split(), "--storage", storage, environment=environment)
    assert done.code == 0, done.err
    # the shards of Spark's tasks are smaller
    assert [options.shard_bytes for options in merged] == [256 << 20] * is_on_spark


@pytest.mark.slow
def test_ctrl_c_ends_a_job_with_one_line(tmp_path):
    """The driver's terminal used to show up to 96 lines of Java."""
    source, storage = write_parquet(messages(100_000, days=1), tmp_path / "m.parquet"), f"file://{tmp_path}/storage"
    log = "log = logging.getLogger('tiered_index.spark.metrics'); log.setLevel('INFO')"
    code = (
        f"import logging; {log}; log.addHandler(logging.StreamHandler()); from tiered_index.cli import main; main.run()"
    )
    program = [sys.executable, "-c", code, "spark", "build"]
    options = ["--source", source, "--set", "slots=64", "--storage", storage, "--master", "local[2]"]
    options += ["--conf", "spark.ui.enabled=false"]
    for moment in ("count: ", "build: "):
        command, environment = [*program, *options], os.environ | {"SPARK_LOCAL_IP": "127.0.0.1"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=TOP, env=environment, **pipes) as driver:
            assert driver.stderr is not None
            told = next(line for line in driver.stderr if line.startswith(moment))
            driver.send_signal(signal.SIGINT)
            out, errors = driver.communicate(timeout=400.0)
        steps = ("count: ", "build: ", "INFO ", "Spark ")
        lines = [line for line in errors.splitlines() if not line.startswith(steps)]
        assert (driver.returncode, out, lines) == (130, "", ["interrupted"]), told
    with pytest.raises(NotAnIndex):
        total(storage)
