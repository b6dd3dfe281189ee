"""deploy/: its files agree with the code: options, routes, ports, metrics, and each role's operations in a bucket."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.configprovider
import kubernetes_validate
import pytest
import typer.main
import yaml
from botocore.exceptions import ClientError
from moto import mock_aws

from docs.generators import metrics_page
from tests.support.batches import batch
from tests.support.later import Later
from tiered_index import IndexConfig, IndexReader, IndexService
from tiered_index.base.clock import SystemClock
from tiered_index.cli.main import LateCommand, app
from tiered_index.errors import StorageMisconfigured
from tiered_index.server.http.tokens import Tokens, add_token
from tiered_index.service.jobs.merge_run import MergeOptions, merge
from tiered_index.service.jobs.orphans import delete_orphans, find_orphans
from tiered_index.service.log.log import StorageLog
from tiered_index.service.log.publication import MAX_AGE_S
from tiered_index.storage.base import PART_BYTES
from tiered_index.storage.opening import open_storage
from tiered_index.storage.probe import probe_put_if_absent
from tiered_index.storage.s3 import boto as s3
from tiered_index.storage.s3.options import S3Options

DEPLOY = Path(__file__).parents[2] / "deploy"
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
OVERLAYS = sorted((DEPLOY / "kubernetes/overlays").iterdir())
OBJECTS = [
    document
    for file in sorted((DEPLOY / "kubernetes/base").glob("*.yaml"))
    if file.name != "kustomization.yaml"
    for document in yaml.safe_load_all(file.read_text())
]
MONITORS = list(yaml.safe_load_all((DEPLOY / "kubernetes/components/monitoring/monitors.yaml").read_text()))
RULES = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
PANELS = json.loads((DEPLOY / "grafana/tiered-index.json").read_text())["panels"]
DAY_S = 86_400
REGION = botocore.configprovider.BOTOCORE_DEFAUT_SESSION_VARIABLES["region"][1]


def of_kind(*kinds: str) -> list[Any]:
    return [document for document in OBJECTS if document["kind"] in kinds]


def pod(workload: Any) -> Any:
    return workload["spec"]["template"]


WORKLOADS = of_kind("StatefulSet", "Deployment")
OURS = [
    (workload, c)
    for workload in WORKLOADS
    for c in pod(workload)["spec"]["containers"]
    if c["image"].startswith("tiered-index")
]


def region_of(container: dict[str, Any]) -> Any:
    """Return the reference to the region, which a container must set by name: EKS adds a region to others."""
    return next(variable["valueFrom"]["configMapKeyRef"] for variable in container["env"] if variable["name"] == REGION)


def arguments(unit: str) -> list[str]:
    (line,) = re.findall(r"^ExecStart=\S+ (.*)$", unit, re.M)
    return shlex.split(line)


UNIT = (DEPLOY / "systemd/tiered-index.service").read_text()
COMMANDS = {
    "systemd": arguments(UNIT),
    "compose": COMPOSE["services"]["service"]["command"],
    **{f"{workload['kind']}/{workload['metadata']['name']}": container["args"] for workload, container in OURS},
}


# Commands

CLI = {
    name: command.loaded() if isinstance(command, LateCommand) else command
    for name, command in typer.main.get_command(app).commands.items()  # type: ignore[attr-defined]
}


@pytest.mark.parametrize("where", COMMANDS)
def test_commands_are_ones_that_the_program_takes(where: str) -> None:
    name, *options = COMMANDS[where]
    # raises for an unknown option, and for an invalid value
    values = CLI[name].make_context(name, list(options)).params
    if name == "serve":
        assert values["host"] == "0.0.0.0" and values["tokens"] and not values["insecure"]
    if name == "orphans":
        assert values["yes"]


def options_of(command: Any) -> set[str]:
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(
    "page", ["deploy/README.md", "deploy/RUNBOOK.md", "docs/rocketmq.md", "docs/rocketmq-lookups.md"]
)
def test_pages_name_commands_and_options_that_there_are(page: str) -> None:
    text = (DEPLOY.parent / page).read_text().replace("\n  --", " --")
    named = re.findall(r"(?<![\w/=-])tiered-index ([a-z-]+)([^`\n]*)", text)
    assert named
    for name, rest in named:
        assert set(re.findall(r"(?<!\w)--[\w-]+", rest)) <= options_of(CLI[name]), (name, rest)
    assert set(re.findall(r"`(--[\w-]+)", text)) <= set().union(*map(options_of, CLI.values()))


# Containers


def test_the_image_is_not_roots_and_comes_from_the_lock_file() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    *_, last = re.split(r"^FROM ", text, flags=re.M)
    (user,) = re.findall(r"^USER (\d+):\d+$", last, re.M)
    assert int(user) > 0 and f"--uid {user}" in last
    assert text.count("\nFROM ") == 2 and "RUN bash deploy/install.sh" in text and "install.sh" not in last
    taken = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    for source in re.findall(r"^COPY (?!--from)(.*) \S+$", text, re.M):
        for path in source.split():
            assert (DEPLOY.parent / path).exists() and f"!{path}" in taken
    for workload, container in OURS:
        of_pod = pod(workload)["spec"]["securityContext"].get("runAsUser")
        assert container["securityContext"].get("runAsUser", of_pod) == int(user)


def test_the_images_recipe_passes_hadolint() -> None:
    linter = Path(sys.executable).with_name("hadolint")
    linted = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (linted.returncode, linted.stdout) == (0, "")
    # a tag can later name another image
    bases = re.findall(r"^FROM (\S+)", (DEPLOY / "Dockerfile").read_text(), re.M)
    others = [service["image"] for service in COMPOSE["services"].values() if "build" not in service]
    assert all(re.search(r":[\w.-]+@sha256:[0-9a-f]{64}$", image) for image in bases + others)


@pytest.mark.parametrize("document", OBJECTS, ids=lambda document: f"{document['kind']}/{document['metadata']['name']}")
def test_kubernetes_accepts_the_objects(document: Any) -> None:
    kubernetes_validate.validate(document, "1.37", strict=True)


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload["metadata"]["name"])
def test_pods_are_confined(workload: Any) -> None:
    spec = pod(workload)["spec"]
    assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
    # the Service tiered-index would set variables TIERED_INDEX_*
    assert spec["enableServiceLinks"] is False
    assert spec["serviceAccountName"] in {account["metadata"]["name"] for account in of_kind("ServiceAccount")}
    assert (DEPLOY / f"iam/{spec['serviceAccountName'].removeprefix('tiered-index-')}.json").exists()
    volumes = {volume["name"] for volume in spec["volumes"]}
    volumes |= {claim["metadata"]["name"] for claim in workload["spec"].get("volumeClaimTemplates", [])}
    for container in spec["containers"]:
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        resources = container["resources"]
        assert {"cpu", "memory"} <= resources["requests"].keys() and "memory" in resources["limits"]
        assert not container["securityContext"]["allowPrivilegeEscalation"]
        if (workload, container) in OURS:
            assert container["securityContext"]["readOnlyRootFilesystem"]
            # what a command writes is on a volume, and a broker's store is not written
            writable = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
            read_only = {m["mountPath"] for m in container["volumeMounts"]} - {*writable}
            options = dict(argument.lstrip("-").partition("=")[::2] for argument in container["args"])
            for option in {"root", "cache-dir", "audit-log"} & options.keys():
                assert any(Path(options[option]).is_relative_to(path) for path in writable)
            assert "/tmp" in writable and {options[name] for name in {"follow"} & options.keys()} <= read_only


def test_compose_is_confined_and_its_files_are_there() -> None:
    services = COMPOSE["services"]
    restarts = {name: service["restart"] for name, service in services.items()}
    assert restarts == dict.fromkeys(services, "unless-stopped") | {"set-up": "on-failure"}
    assert services["service"]["read_only"] and services["service"]["cap_drop"] == ["ALL"]
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
        for volume in service.get("volumes", []):
            source = volume["source"] if isinstance(volume, dict) else volume.partition(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in COMPOSE["volumes"]
    (job,) = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["service:8080"]}] and 'job="tiered-index"' in RULES[0]["expr"]
    assert job["job_name"] == "tiered-index"
    # of the tokens, Prometheus gets its own one only
    (tokens,) = [volume for volume in services["prometheus"]["volumes"] if "tokens" in str(volume)]
    assert (tokens["volume"], tokens["read_only"]) == ({"subpath": "prometheus"}, True)
    assert job["authorization"] == {"credentials_file": f"{tokens['target']}/token"}


def test_the_set_up_of_compose_goes_on_after_a_kill(tmp_path: Path) -> None:
    """A kill between the file of tokens and the file of one token would otherwise end every restart with an error."""
    script = COMPOSE["services"]["set-up"]["command"][0].partition("cd /data\n")[2]
    add_token(tmp_path / "tokens.json", "demo", "admin", None)
    (tmp_path / "demo").touch()
    told = []
    for _ in range(2):
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        subprocess.run(["sh", "-euc", script], cwd=tmp_path, env=os.environ | {"PATH": path}, check=True)
        told.append([(tmp_path / name).read_text() for name in ("demo", "prometheus/token")])
    assert told[0] == told[1]
    known = Tokens(tmp_path / "tokens.json")
    assert [caller and caller.role for caller in map(known.find, " ".join(told[0]).split())] == ["admin", "read"]


# Routes and ports


def test_probes_and_scrapes_ask_for_routes_on_the_port_that_is_served(client: Any) -> None:
    paths = re.findall(r"localhost:8080(/\w+)", json.dumps(COMPOSE["services"]["service"]["healthcheck"]))
    for workload, container in OURS:
        if container["args"][0] != "serve":
            continue
        (port,) = container["ports"]
        assert f"--port={port['containerPort']}" in container["args"]
        probes = [container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")]
        assert {probe["port"] for probe in probes} == {port["name"]}
        # a service that is not ready must not be killed
        assert [probe["path"] for probe in probes] == ["/livez", "/livez", "/readyz"]
        paths += [probe["path"] for probe in probes]
        (policy,) = [p for p in of_kind("NetworkPolicy") if p["metadata"]["name"] == workload["metadata"]["name"]]
        assert {"port": port["containerPort"]} in policy["spec"]["ingress"][-1]["ports"]
    for monitor in MONITORS:
        (endpoint,) = monitor["spec"].get("endpoints") or monitor["spec"]["podMetricsEndpoints"]
        assert endpoint["port"] == port["name"] and "tiered-index" in endpoint["relabelings"][0].values()
        # the service refuses every request without a token
        assert endpoint["authorization"]["credentials"] == {"name": "tiered-index-prometheus", "key": "token"}
        paths.append(endpoint["path"])
    assert len(paths) == 9
    for path in paths:
        assert client.get(path).status_code == 200


def test_selectors_find_their_pods() -> None:
    labels = {workload["metadata"]["name"]: pod(workload)["metadata"]["labels"] for workload in WORKLOADS}
    for document in of_kind("Service", "PodDisruptionBudget", "NetworkPolicy", "StatefulSet", "Deployment"):
        spec = document["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        wanted = selector.get("matchLabels", selector)
        assert any(wanted.items() <= pod_labels.items() for pod_labels in labels.values()), document["metadata"]["name"]
    services = {str(document["metadata"].get("labels")): document["spec"] for document in of_kind("Service")}
    for monitor in MONITORS:
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert str(wanted) in services or any(wanted.items() <= pod_labels.items() for pod_labels in labels.values())
    for workload in of_kind("StatefulSet", "Deployment"):
        budgets = [b["spec"]["selector"] for b in of_kind("PodDisruptionBudget")]
        assert workload["spec"]["selector"] in budgets


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="there is no kubectl")
@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda overlay: overlay.name)
def test_kubernetes_accepts_the_rendered_overlays(overlay: Path) -> None:
    done = subprocess.run(["kubectl", "kustomize", overlay], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    rendered = list(yaml.safe_load_all(done.stdout))
    for document in rendered:
        assert document["metadata"]["namespace"] == "tiered-index"
        if not document["apiVersion"].startswith("monitoring.coreos.com/"):
            kubernetes_validate.validate(document, "1.37", strict=True)
    by_name = {(document["kind"], document["metadata"]["name"]): document for document in rendered}
    (settings,) = [document for document in rendered if document["kind"] == "ConfigMap"]
    for document in rendered:
        if document["kind"] not in ("StatefulSet", "Deployment"):
            continue
        for container in pod(document)["spec"]["containers"]:
            if "args" not in container:
                continue
            assert re.fullmatch(r"[\w./-]+@sha256:[0-9a-f]{64}", container["image"])
            assert container["envFrom"][0] == {"configMapRef": {"name": settings["metadata"]["name"]}}
            assert region_of(container)["name"] == settings["metadata"]["name"]
            name, *options = container["args"]
            CLI[name].make_context(name, list(options))
    reader = by_name["Deployment", "tiered-index-reader"]["spec"]["template"]["spec"]
    (container,) = reader["containers"]
    (endpoint,) = by_name["ServiceMonitor", "tiered-index-reader"]["spec"]["endpoints"]
    is_tls = "--tls-cert=/etc/tiered-index-tls/tls.crt" in container["args"]
    schemes = {container[f"{kind}Probe"]["httpGet"].get("scheme") for kind in ("startup", "liveness", "readiness")}
    assert (schemes, endpoint.get("scheme")) == (({"HTTPS"}, "https") if is_tls else ({None}, None))
    endpoint_url = settings["data"].get("AWS_ENDPOINT_URL_S3")
    for name in ("tiered-index-reader",):
        egress = by_name["NetworkPolicy", name]["spec"]["egress"]
        ports = {port["port"]: rule.get("to") for rule in egress for port in rule["ports"]}
        # credentials of EKS Pod Identity come only from this address
        assert {"ipBlock": {"cidr": "169.254.170.23/32"}} in ports[80] and ports[443] is None
        assert endpoint_url is None or urlsplit(endpoint_url).port in ports
    # the sidecar's own connections are not restricted
    assert by_name["NetworkPolicy", "rocketmq-broker"]["spec"]["policyTypes"] == ["Ingress"]
    assert {monitor["kind"] for monitor in MONITORS} == {"ServiceMonitor", "PodMonitor"}
    assert all((monitor["kind"], monitor["metadata"]["name"]) in by_name for monitor in MONITORS)
    if ("Ingress", "tiered-index") in by_name:
        ingress = by_name["Ingress", "tiered-index"]["spec"]
        assert [rule["host"] for rule in ingress["rules"]] == ingress["tls"][0]["hosts"]
        (path,) = ingress["rules"][0]["http"]["paths"]
        service = by_name["Service", path["backend"]["service"]["name"]]
        assert path["backend"]["service"]["port"]["name"] in [port["name"] for port in service["spec"]["ports"]]
    assert overlay.name != "eks" or ("Ingress", "tiered-index") in by_name
    assert is_tls == (overlay.name == "s3-server")


@pytest.mark.skipif(shutil.which("systemd-sysusers") is None, reason="there is no systemd-sysusers")
def test_the_units_user_and_its_groups_are_made(tmp_path: Path) -> None:
    (user,) = re.findall(r"^User=(.*)$", UNIT, re.M)
    file = DEPLOY / "systemd/tiered-index.sysusers"
    (tmp_path / "etc").mkdir()
    subprocess.run(["systemd-sysusers", f"--root={tmp_path}", file], check=True, capture_output=True, timeout=60)
    assert re.search(rf"^{user}:", (tmp_path / "etc/passwd").read_text(), re.M)
    groups = (tmp_path / "etc/group").read_text()
    # no group is assumed to exist
    assert re.search(rf"^rocketmq:.*\b{user}$", groups, re.M) and "SupplementaryGroups" not in UNIT
    for group in re.findall(r"^Group=(.*)$", UNIT, re.M):
        assert re.search(rf"^{group}:", groups, re.M)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / "tiered-index.service"
    unit.write_text(UNIT.replace("/opt/tiered-index/bin/tiered-index", shutil.which("true") or ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


# Metrics


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """Each sample that a writer's sidecar exports, with its labels."""
    with metrics_page.exported() as families:
        return {sample.name: set(sample.labels) for family in families["writer"] for sample in family.samples}


EXPRESSIONS = {rule["alert"]: rule["expr"] for rule in RULES} | {
    f"{panel['title']}/{target['refId']}": target["expr"] for panel in PANELS for target in panel.get("targets", [])
}


@pytest.mark.parametrize("where", EXPRESSIONS)
def test_alerts_and_panels_use_exported_metrics(exported: dict[str, set[str]], where: str) -> None:
    text = EXPRESSIONS[where]
    added = {"job", "instance"}
    metrics = re.findall(r"\b(up|tiered_index_\w+)(?:\{([^}]*)\})?", text.replace('job="tiered-index"', "job=~x"))
    assert metrics
    labels = set[str]()
    for name, selector in metrics:
        have = exported[name] if name != "up" else set()
        labels_named = set(re.findall(r"(\w+)(?:=~|!~|!=|=)", selector))
        assert labels_named <= have | added, name
        labels |= have
    grouped = {label.strip() for labels_by in re.findall(r"\bby \(([^)]*)\)", text) for label in labels_by.split(",")}
    assert grouped <= labels | added
    assert text.count("(") == text.count(")")


def test_each_alert_has_its_entry_and_each_entry_its_alert(exported: dict[str, set[str]]) -> None:
    text = (DEPLOY / "RUNBOOK.md").read_text()
    assert set(re.findall(r"`(tiered_index_\w+)", text)) <= exported.keys()
    entries = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    assert list(entries) == [rule["alert"] for rule in RULES]
    for name, entry in entries.items():
        assert re.findall(r"^- \*\*(\w+)\*\*: \S", entry, re.M) == ["Meaning", "Check", "Fix"], name
    assert all(
        rule["labels"]["severity"] in ("warning", "critical") and rule["annotations"]["summary"] for rule in RULES
    )


# Policies

BUCKET, PREFIX = "deployed", "brokers/a"
ROLES = ("writer", "reader", "merger")
# operation of S3 -> its name in a policy, for the bucket or for a key
BUCKETS = {"ListObjectsV2": "ListBucket", "ListMultipartUploads": "ListBucketMultipartUploads"}
WRITES = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")
KEYS = dict.fromkeys(WRITES, "PutObject") | dict.fromkeys(("GetObject", "HeadObject"), "GetObject")
KEYS |= dict.fromkeys(("DeleteObject", "DeleteObjects"), "DeleteObject")
KEYS |= {"AbortMultipartUpload": "AbortMultipartUpload", "ListParts": "ListMultipartUploadParts"}


def allows(policy: Any, action: str, resource: str) -> bool:
    for statement in policy["Statement"]:
        assert statement.keys() == {"Sid", "Effect", "Action", "Resource"} and statement["Effect"] == "Allow"
        if action in statement["Action"] and any(fnmatchcase(resource, pattern) for pattern in statement["Resource"]):
            return True
    return False


class Enforcing:
    """S3 as a role sees it, which refuses what the role's policy does not allow. `used`: each role's actions."""

    def __init__(self) -> None:
        self.role = ""
        self.used: dict[str, set[str]] = {role: set() for role in ROLES}
        texts = {role: (DEPLOY / f"iam/{role}.json").read_text() for role in ROLES}
        self.policies = {
            role: json.loads(text.replace("BUCKET", BUCKET).replace("PREFIX", "brokers/*"))
            for role, text in texts.items()
        }

    def client(self, *_: object) -> Any:
        """Return a client of the present role."""
        role = self.role
        made = boto3.client("s3", region_name="us-east-1")

        def enforce(params: dict[str, Any], model: Any, **_: object) -> None:
            operation = model.name
            keys = (
                [object_named["Key"] for object_named in params["Delete"]["Objects"]]
                if "Delete" in params
                else [params.get("Key")]
            )
            action = "s3:" + (BUCKETS | KEYS)[operation]
            for key in keys:
                resource = f"arn:aws:s3:::{params['Bucket']}" + (f"/{key}" if operation in KEYS else "")
                if not allows(self.policies[role], action, resource):
                    error = {"Code": "AccessDenied", "Message": f"{role}: {action} of {resource}"}
                    refusal: Any = {"Error": error, "ResponseMetadata": {"HTTPStatusCode": 403}}
                    raise ClientError(refusal, operation)
            self.used[role].add(action)

        made.meta.events.register("provide-client-params.s3", enforce)
        return made


@pytest.fixture
def enforcing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Enforcing]:
    with mock_aws():
        boto3.client("s3", region_name="us-east-1").create_bucket(Bucket=BUCKET)
        world = Enforcing()
        monkeypatch.setattr(s3, "client_of", world.client)
        yield world


def test_each_role_can_do_its_work_under_its_policy_and_no_more(enforcing: Enforcing, tmp_path: Path) -> None:
    uri, options = f"s3://{BUCKET}/{PREFIX}", S3Options()
    now_s = SystemClock().now_ms() // 1000
    begin_ms = (now_s // DAY_S - 3) * DAY_S * 1000

    enforcing.role = "writer"
    settings: Any = {"slots": 100, "items": 1000, "s3": options, "background": False}
    for life in range(3):
        with IndexService.open(root=tmp_path / str(life), storage=uri, **settings) as index:
            own = {"key": [f"k{number % 10}" for number in range(100)], "offset": range(life * 100, life * 100 + 100)}
            index.put_batch(batch(100, topic="orders", size=100, timestamp_ms=begin_ms, **own))
            index.seal()
            index.run_lifecycle()
    writing = open_storage(uri, options=options)
    # large files are sent in parts; jobs drop half-made uploads
    with writing.open_writer("data/large/1.index") as stream:
        stream.write(bytes(PART_BYTES + 1))
    left = [writing.open_writer(f"{folder}/left/1.index") for folder in ("data", "segments")]
    for stream in left:
        stream.write(bytes(PART_BYTES + 1))
    failed = writing.open_writer("data/failed/1.index")
    failed.write(bytes(PART_BYTES + 1))
    failed.abort()
    assert len(writing.purge(0)) == len(left)
    for name in ("log/00000000000000000001", "epoch/00000000000000000001"):
        with pytest.raises(StorageMisconfigured):
            writing.delete_many([name])

    enforcing.role = "merger"
    merging = open_storage(uri, options=options)
    log = StorageLog(merging, SystemClock())
    log.open()
    probe_put_if_absent(merging)
    report = merge(merging, log, SystemClock(), MergeOptions())
    assert (report.sources, report.tables) == (3, 1)
    gone = delete_orphans(merging, find_orphans(Later(merging, 3 * DAY_S), log))
    # three sources, and an upload that was never published
    assert len(gone.objects) == 4 and merging.purge(0) == ()
    for name in ("epoch/00000000000000000099", "lease/x", "segments/x", "other"):
        with pytest.raises(StorageMisconfigured):
            merging.put_if_absent(name, b"")
    with pytest.raises(StorageMisconfigured):
        merging.delete_many(["log/00000000000000000001"])

    enforcing.role = "reader"
    with IndexReader.open(uri, s3=options) as reader:
        answer = reader.query("orders", "k5")
        assert answer.status == "complete" and len(answer) == 30
    reading = open_storage(uri, options=options)
    for folder in ("log", "checkpoint", "data", "segments", "probe"):
        with pytest.raises(StorageMisconfigured):
            reading.put(f"{folder}/x", b"")
        with pytest.raises(StorageMisconfigured):
            reading.delete_many([f"{folder}/x"])
    # another index's objects belong to that index
    with pytest.raises(StorageMisconfigured):
        open_storage(f"s3://{BUCKET}/elsewhere", options=options).get("log/00000000000000000001")

    # nothing is allowed that no role needs; a role lists parts only if Ceph's gateway answers an error
    for role, policy in enforcing.policies.items():
        granted = {action for statement in policy["Statement"] for action in statement["Action"]}
        assert granted - {"s3:ListMultipartUploadParts"} == enforcing.used[role], role


def test_the_buckets_rules_keep_the_indexs_objects() -> None:
    rules = json.loads((DEPLOY / "iam/lifecycle.json").read_text())["Rules"]
    for rule in rules:
        assert rule["Status"] == "Enabled"
        assert set(rule.get("Expiration", {})) <= {"ExpiredObjectDeleteMarker"} and "Transitions" not in rule
    (days,) = [
        rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
        for rule in rules
        if "AbortIncompleteMultipartUpload" in rule
    ]
    assert days * DAY_S > MAX_AGE_S
    with mock_aws():
        bucket = boto3.client("s3", region_name="us-east-1")
        bucket.create_bucket(Bucket=BUCKET)
        bucket.put_bucket_lifecycle_configuration(Bucket=BUCKET, LifecycleConfiguration={"Rules": rules})
        assert len(bucket.get_bucket_lifecycle_configuration(Bucket=BUCKET)["Rules"]) == len(rules)


def test_the_buffers_alert_fires_before_either_bound() -> None:
    config = IndexConfig()
    bounds = {"buffered_bytes": config.buffer_max_bytes, "buffered_entries": config.buffer_max_entries}
    (rule,) = [rule for rule in RULES if rule["alert"] == "TieredIndexBufferFills"]
    thresholds = dict(re.findall(r"tiered_index_(\w+) > (\S+)", rule["expr"]))
    assert thresholds.keys() == bounds.keys()
    assert all(0.5 < float(thresholds[name]) / bound < 0.9 for name, bound in bounds.items())


def test_the_token_for_prometheus_operator_has_no_line_end(tmp_path: Path) -> None:
    # the operator copies the secret as it is, and no header may have a line end
    (line,) = re.findall(r"^tiered-index (token prometheus .*> token)\b", (DEPLOY / "README.md").read_text(), re.M)
    script = f"{shlex.quote(str(Path(sys.executable).with_name('tiered-index')))} {line}"
    command = ["bash", "-euo", "pipefail", "-c", script]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=60)
    assert re.fullmatch(r"ti_[\w-]+", (tmp_path / "token").read_text())


def test_overlays_set_the_region_by_the_variable_that_boto3_reads() -> None:
    # optional, because a server without regions needs none
    expected = {"name": "tiered-index", "key": REGION, "optional": True}
    assert all(region_of(container) == expected for _, container in OURS)
    for file in (DEPLOY / "kubernetes").rglob("kustomization.yaml"):
        for made in yaml.safe_load(file.read_text()).get("configMapGenerator", []):
            if made["name"] == "tiered-index":
                names = {literal.partition("=")[0] for literal in made["literals"]}
                assert REGION in names and names <= {"BUCKET", REGION, "AWS_ENDPOINT_URL_S3"}, file


def test_a_lag_that_is_not_known_and_a_writer_on_another_host_fire_their_alerts() -> None:
    # a comparison leaves NaN out, so the expression subtracts the healthy ones instead
    name = "tiered_index_follow_lag_seconds"
    assert EXPRESSIONS["TieredIndexFollowerBehind"] == f"{name} unless {name} <= 300"
    # the series of another host is new and constant, so it has no change
    name = "tiered_index_writer_epoch"
    assert EXPRESSIONS["TieredIndexTakenOver"] == f"changes({name}[1h]) > 0 or ({name} > 0 unless {name} offset 1h)"
