"""stub"""
from tiered_index.cli.session import Session, command


@command
def demo(session: Session) -> int:
    """Stub."""
    return 0
