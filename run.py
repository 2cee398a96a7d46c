"""The front door: `python run.py --help`."""

import signal
import sys

# While the imports take their second or two, Ctrl-C just ends: no traceback, and none that an import swallows.
signal.signal(signal.SIGINT, signal.SIG_DFL)

from vocabjax.cli import main  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)

if __name__ == "__main__":
    sys.exit(main())
