"""The front door: `python run.py --help`."""

import sys

from vocabjax.cli import main

if __name__ == "__main__":
    sys.exit(main())
