"""`python -m tests.demo`."""

from __future__ import annotations

from tests.demo.command import main

if __name__ == "__main__":
    main()
