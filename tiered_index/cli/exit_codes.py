"""The exit codes of the command line. Those of errors are the `exit_code` of their classes (`errors.py`)."""

from tiered_index.errors import BudgetExceeded, InvalidArgument, SetupUnavailable

DONE = 0
FINDING = 1
"""The command is done and found or lost something: a failed check, a lost range, no message with a key."""
USAGE = InvalidArgument.exit_code
NOT_LOADED = SetupUnavailable.exit_code
"""The command can't be loaded: memory is lacking, or the installation is damaged."""
PARTIAL = BudgetExceeded.exit_code
"""A part could not be read, or a budget ended the command."""
UNEXPECTED = 70
# as shells report them: 128 and the signal's number
INTERRUPTED, CLOSED_PIPE = 130, 141
