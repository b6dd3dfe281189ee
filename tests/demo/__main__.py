"""`python -m tests.demo`."""

from tests.demo.command import main

if __name__ == "__main__":
    main()
