"""Commands that ask a service (`--url`) in place of an index: same words, same answers. Loads the client when asked."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered_index.cli.session import Session
from tiered_index.errors import ConfigError, InvalidArgument

if TYPE_CHECKING:
    from tiered_index.client import IndexClient

_POLL_S = 0.2


def asked_service(session: Session, url: str | None, token_file: Path | None, **given: object) -> IndexClient | None:
    """Return a client of the service that `--url` names; None: an index is asked. `given` are options of indexes alone.

    Raises `InvalidArgument` where one is given beside it, `ConfigError` where the token can't be read.
    """
    if url is None:
        if token_file is not None:
            raise InvalidArgument("--token-file is for a service: give --url, too")
        return None
    own = {"root": session.root, "storage": session.storages, **given}
    wrong = next((name for name, value in own.items() if value), None)
    if wrong is not None:
        flag = "FILES" if wrong == "files" else f"--{wrong.replace('_', '-')}"
        raise InvalidArgument(f"--url asks a service, which has its own index: leave {flag} out")
    from tiered_index.client import IndexClient

    try:
        token = token_file.read_text().strip() if token_file is not None else None
    except OSError as error:
        raise ConfigError(f"{token_file} can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{token_file} holds no token: it is no text") from error
    return IndexClient(url, token=token)


def verified_by(session: Session, client: IndexClient, *, deep: bool) -> dict[str, Any]:
    """Have a service verify its index, and return the report's document. Raises as the service's job."""
    from tiered_index.client.answers import error_of

    job = client.verify(deep=deep)
    with session.progress("verifying", None) as progress:
        while job["state"] == "running":
            progress.update(job["checked"], job["doing"])
            time.sleep(_POLL_S)
            job = client.verification(job["id"])
    if job["problem"] is not None:
        raise error_of(job["problem"])
    report: dict[str, Any] = job["report"]
    return report
