"""`tiered-index token`: adds a token to the token file of a service."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from tiered_index.cli.session import Session


def token(
    session: Session,
    *,
    name: str,
    file: Path,
    role: Literal["read", "write", "admin"],
    topics: list[str] | None,
    max_topics: int | None,
) -> int:
    """Create a token for the service and print it, once."""
    from tiered_index.server.http.tokens import add_token

    made = add_token(file, name, role, topics or None, max_topics)
    session.out.answer({"name": name, "role": role, "topics": topics or None, "file": str(file), "token": made})
    session.out.line(made)
    session.out.remark(f"{name} has the role {role}; {file} keeps the token's hash only, so keep the token now")
    return 0
