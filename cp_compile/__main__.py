"""The command line: ``python -m cp_compile``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cp_compile import demo, explain_command
from cp_compile._version import __version__


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m cp_compile", description="Context parallelism as a torch.compile backend."
    )
    parser.add_argument("--version", action="version", version=f"cp-compile {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    shown = commands.add_parser(
        "demo",
        help="run a model on several local ranks and compare it with one process",
        description="Runs an unmodified model with random weights on several local ranks, through torch.compile with "
        "our backend, and compares it with one process. Exit status 0 only if the answers are equal.",
    )
    demo.add_arguments(shown)
    shown.set_defaults(run=demo.run, error=shown.error)
    explained = commands.add_parser(
        "explain",
        help="print what would run sharded on any number of ranks, and why not the rest, without starting one",
        description="Plans a model for any number of ranks, without starting them, and prints the report.",
    )
    explain_command.add_arguments(explained)
    explained.set_defaults(run=explain_command.run, error=explained.error)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args, args.error))
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
