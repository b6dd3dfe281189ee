"""`tiered-index token`: adds a token to the token file of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from typer import Argument, Option

from tiered_index.cli.session import Session, command


@command
def token(
    session: Session,
    name: str = Argument(metavar="NAME", help="Name of the token, also in logs."),
    file: Path = Option(Path("tokens.json"), "--file", metavar="FILE", help="File of tokens, for serve --tokens."),
    role: Literal["read", "write", "admin"] = Option(
        "read", help="read: lookups and lists. write: also POST /v1/entries. admin: also verify."
    ),
    topics: list[str] | None = Option(None, metavar="PREFIX", help="Allow topics with this prefix only. Repeatable."),
    max_topics: int | None = Option(
        None, min=0, help="Limit of topics that it may write to while a service runs. Default with --topics: 10000."
    ),
) -> int:
    """Create a token for the service and print it, once.

    [bold]Examples[/bold]

      tiered-index token grafana --file tokens.json

      tiered-index token billing --role read --topics order --topics invoice --file tokens.json

    The file has only the token's hash. To revoke a token, remove it from the file: a running service refuses it within
    a second.
    """
    from tiered_index.server.tokens import add_token

    made = add_token(file, name, role, topics or None, max_topics)
    session.out.answer({"name": name, "role": role, "topics": topics or None, "file": str(file), "token": made})
    session.out.line(made)
    session.out.remark(f"{name} has the role {role}; {file} keeps the token's hash only, so keep the token now")
    return 0
