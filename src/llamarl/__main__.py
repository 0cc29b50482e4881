"""``python -m llamarl``: the command ``llamarl``, for a shell whose path lacks it."""

import sys

from llamarl.cli.main import command

if __name__ == "__main__":
    sys.exit(command())
