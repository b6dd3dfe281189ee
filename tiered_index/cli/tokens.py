"""`tiered-index token`: who may use a service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from typer import Argument, Option

from tiered_index.cli.session import Session, command


@command
def token(
    session: Session,
    name: str = Argument(metavar="NAME", help="What the token is called, in logs, too.", show_default=False),
    file: Path = Option(
        Path("tokens.json"), "--file", metavar="FILE", help="File of tokens, as serve --tokens takes it."
    ),
    role: Literal["read", "write", "admin"] = Option(
        "read", help="read: lookups and lists; write: POST /v1/entries, too; admin: verify, too."
    ),
    topics: list[str] | None = Option(
        None, metavar="PREFIX", help="Only topics that begin so; several times.", show_default=False
    ),
) -> int:
    """Make a token for the service and print it, once: the file has its hash only.

    To end a token, take it out of the file: a running service sees that within a second.

    [bold]Examples[/bold]

      tiered-index token grafana --file tokens.json

      tiered-index token billing --role read --topics order --topics invoice --file tokens.json
    """
    from tiered_index.server.tokens import add_token

    made = add_token(file, name, role, topics)
    session.out.answer({"name": name, "role": role, "topics": topics or None, "file": str(file), "token": made})
    session.out.line(made)
    session.out.remark(f"{name} has the role {role}; {file} keeps the token's hash only, so keep the token now")
    return 0
