"""`tiered-index demo --serve`: a broker writes a store, and `tiered-index serve` follows it and answers.

Two processes beside this one, which waits for them and ends them. The index's storage is a folder.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from tiered_index.cli.demo.processes import Broker, ProcessFailed
from tiered_index.cli.output import Output
from tiered_index.cli.progress import Ending
from tiered_index.errors import ConfigError
from tiered_index.format.layout import Layout

_LOOKUP = "topic=orders&key=order-0000001"
_POLL_S = 0.1


@dataclass(frozen=True)
class ServedDemo:
    """What is started in `folder`, whose store is followed where it has one already; `layout` is the files'."""

    folder: Path
    messages: int
    seed: int
    layout: Layout
    port: int
    rocketmq_port: int
    config_file: Path | None = None

    def run(self, out: Output) -> None:
        """Start both, say where they listen, and return once the service has ended, by Ctrl-C or SIGTERM.

        Raises `ConfigError` without the extra 'server', and `ProcessFailed` where a process fails.
        """
        try:
            from tiered_index.server.tokens import add_token
        except ModuleNotFoundError as error:
            raise ConfigError(f"--serve needs the extra 'server' ({error.name} is missing)") from error
        tokens, store = self.folder / "tokens.json", self.folder / "store"
        tokens.unlink(missing_ok=True)
        token = add_token(tokens, "demo", "admin", None)
        with contextlib.ExitStack() as stack:
            if not store.exists():
                # with a tail of nothing it writes all of it in one go
                stack.enter_context(Broker(self.messages, self.seed, self.messages, store))
            ending = stack.enter_context(Ending())
            service = stack.enter_context(self._service(tokens, store))
            self._tell(out, service, token)
            while service.poll() is None and not ending.event.wait(_POLL_S):
                pass
            service.terminate()
            service.wait()
        if service.returncode:
            raise ProcessFailed(f"serve ended with exit code {service.returncode}")

    def _service(self, tokens: Path, store: Path) -> subprocess.Popen[str]:
        places = ["--root", f"{self.folder / 'root'}", "--storage", f"file://{self.folder / 'storage'}"]
        if self.config_file is not None:
            places += ["--config", f"{self.config_file}"]
        writing = ["--follow", f"{store}", "--store-name", "demo", "--archive-segments"]
        # RocketMQ's protocol has no tokens: on this host everybody may ask there
        guard = ["--tokens", f"{tokens}", "--insecure"]
        ports = ["--port", f"{self.port}", "--rocketmq-port", f"{self.rocketmq_port}"]
        geometry = {"TIERED_INDEX_SLOTS": f"{self.layout.slots}", "TIERED_INDEX_ITEMS": f"{self.layout.items}"}
        return subprocess.Popen(
            [sys.executable, "-m", "tiered_index.cli", "serve", *places, *writing, *guard, *ports, "--json", "--quiet"],
            env={**os.environ, **geometry},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )

    def _tell(self, out: Output, service: subprocess.Popen[str], token: str) -> None:
        assert service.stdout is not None
        # the follower tells how far it is, too, before and after
        urls = next((urls for line in service.stdout if (urls := json.loads(line).get("urls"))), None)
        if urls is None:
            return
        threading.Thread(target=service.stdout.read, daemon=True).start()
        url, rocketmq = urls
        address = rocketmq.rpartition("/")[2]
        # what follows # is sent to nobody, and the console takes the token out of its address
        console = f"{url}/console/#token={token}&search?{_LOOKUP}"
        told = {"status": "serving", "url": url, "console": console, "rocketmq": address, "token": token}
        out.answer(told, streamed=True)
        out.fields({"console": console, "HTTP": url, "token": token, "RocketMQ's tools": f"name server {address}"})
        out.line(f'curl -H "Authorization: Bearer {token}" "{url}/v1/query?{_LOOKUP}&max_count=3"')
        out.line(f"mqadmin queryMsgByKey -n {address} -t orders -k order-0000001")
        out.flush()
