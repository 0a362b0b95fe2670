"""`polymux` on the command line, and `python -m polymux`."""

import sys


def main() -> None:
    from polymux.core.cli import run

    sys.exit(run())


if __name__ == "__main__":
    main()
