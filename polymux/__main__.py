"""`polymux` on the command line, and `python -m polymux`."""

import sys

from polymux.core.stopwatch import begin


def main() -> None:
    begin()
    from polymux.core.cli import run

    sys.exit(run())


if __name__ == "__main__":
    main()
