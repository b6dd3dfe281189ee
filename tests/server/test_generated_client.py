"""Other tools can use `/openapi.json`: a validator accepts it, and a generated client gets answers."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator

from tests.server.conftest import DESCRIPTION, PATIENCE_S, on_a_port
from tiered_index.server.tokens import add_token

PACKAGE = "generated_tiered_index"


def test_the_description_is_one_of_openapi(client):
    document = client.get("/openapi.json").json()
    assert [error.message for error in OpenAPIV31SpecValidator(document).iter_errors()] == []
    for path in ("/livez", "/readyz"):
        # it marks the routes that need no token
        assert document["paths"][path]["get"]["security"] == []


@pytest.fixture
def generated(tmp_path, monkeypatch):
    """The module of OpenAPI Generator's client for Python."""
    parts = "apis,models,supportingFiles,apiDocs=false,modelDocs=false,apiTests=false,modelTests=false"
    generator = Path(sys.executable).with_name("openapi-generator-cli")
    (tmp_path / "openapi.json").write_text(json.dumps(DESCRIPTION))
    named = (
        "-i",
        tmp_path / "openapi.json",
        "-o",
        tmp_path / "client",
        "--package-name",
        PACKAGE,
        "--global-property",
        parts,
    )
    # half the time of the default
    fast = {"JAVA_TOOL_OPTIONS": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
    line, how = [generator, "generate", "-g", "python", *map(str, named)], {"timeout": 10 * PATIENCE_S, "check": False}
    done = subprocess.run(line, env=os.environ | fast, capture_output=True, text=True, **how)
    assert done.returncode == 0, done.stderr
    monkeypatch.syspath_prepend(tmp_path / "client")
    yield importlib.import_module(PACKAGE)
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]


@pytest.mark.long
def test_a_generated_client_gets_the_answers_of_the_service(index, generated, tmp_path):
    token = add_token(tmp_path / "tokens.json", "shop", "read", None)
    with on_a_port(index, tokens=tmp_path / "tokens.json") as client:
        settings = generated.Configuration(host=str(client.base_url), access_token=token)
        with generated.ApiClient(settings) as asking:
            api = generated.DefaultApi(asking)
            answer = api.query("orders", "order-4711", end_ms=1_762_000_059_000, explain=True)
            params = {"topic": "orders", "key": "order-4711", "end_ms": 1_762_000_059_000}
            got = client.get("/v1/query", params=params, headers={"authorization": f"Bearer {token}"}).json()
            (item,), (expected,) = answer.items, got["items"]
            for name in ("topic", "queue_id", "offset", "size", "timestamp_ms", "key_hash"):
                assert getattr(item, name) == expected[name]
            assert (answer.status, answer.explain.files_read) == ("complete", 1)
            batch = generated.QueryBatchRequest.from_dict({"lookups": [{"topic": "orders", "key": "order-4711"}] * 2})
            assert [len(result.items) for result in api.query_batch(batch).results] == [2, 2]
            with pytest.raises(generated.exceptions.NotFoundException) as missing:
                # the id is a part of the path
                api.message("7F00000100002A9F0000000000000000")
            assert missing.value.status == 404
            assert {topic.topic for topic in api.topics().topics} == {"orders", "payments"}
            assert api.health().to_dict() == {"status": "healthy", "ready": True, "problems": []}
            settings.access_token = "ti_wrong"
            with pytest.raises(generated.exceptions.UnauthorizedException):
                api.topics()
            assert api.readyz().status == "ready"
