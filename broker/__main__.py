"""``python -m broker`` is ``zrpc broker``."""

import sys

from .cli import main

if __name__ == "__main__":
    if sys.argv[1:2] != ["broker"]:
        sys.argv.insert(1, "broker")
    main()
