"""docs/service.md: its commands have the described effects, on a service of this process."""

import json
import os
import re
import subprocess
from pathlib import Path

from tests.rocketmq.test_archived_queues import write_store
from tests.server.conftest import PATIENCE_S, index_in, on_a_port, put_entries
from tiered_index.server.http.tokens import add_token

PAGE = (Path(__file__).parents[2] / "docs" / "service.md").read_text()
URL = "http://localhost:8080"


def test_the_examples_work(tmp_path, capsys):
    token = add_token(tmp_path / "tokens.json", "page", "admin", None)
    blocks = [block for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL) if "curl" in block]
    (program,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    answers = []
    with index_in(tmp_path) as index:
        put_entries(index)
        write_store(tmp_path / "store", [{}] * 3)
        with on_a_port(index, tokens=tmp_path / "tokens.json", store=tmp_path / "store") as client:
            own = str(client.base_url).rstrip("/")
            for block in blocks:
                line, env = ["bash", "-ec", block.replace(URL, own)], os.environ | {"TOKEN": token, "no_proxy": "*"}
                done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
                assert done.returncode == 0, (block, done.stderr)
                answers.append(done.stdout)
            exec(compile(program.replace(URL, own), "service.md", "exec"), {"TOKEN": token})
    query, lines, batch, messages, around, lists, taken, verification = answers
    assert [item["offset"] for item in json.loads(query)["items"]] == [204_800, 1024]
    assert json.loads(lines.splitlines()[-1])["count"] == 2
    assert [len(answer["items"]) for answer in json.loads(batch)["results"]] == [2, 1]
    assert [row["state"] for row in json.loads(messages)["messages"]] == ["missing", "missing"]
    assert [row["queue_offset"] for row in json.loads(around)["messages"]] == [0, 1, 2]
    assert '"topic":"payments"' in lists and "tiered_index_lookups_total" in lists and '"ready"' in lists
    assert json.loads(taken) | {"entries": 1, "position": 1, "durable_position": 1} == json.loads(taken)
    assert json.loads(verification)["deep"] is True
    assert "offset=204800" in capsys.readouterr().out
