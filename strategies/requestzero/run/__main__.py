"""The command line of ``requestzero.run``."""

from __future__ import annotations

import argparse
import sys

from requestzero.run.adoption import Adoption
from requestzero.run.program import run_module, run_script

DESCRIPTION = """\
Runs a Python program unchanged, with request-safe optimizers in the place of DeepSpeed's: every DeepSpeedPlugin of
stages 1 to 3, whoever builds it (Accelerate, transformers' TrainingArguments, TRL), and deepspeed.initialize at these
stages. Whatever else stays DeepSpeed's own is said once. The program sees its own arguments and its own __main__."""

EPILOG = """\
examples:
  accelerate launch --config_file zero2.yaml -m requestzero.run train.py --epochs 3
  torchrun --nproc-per-node 2 -m requestzero.run -m package.train --epochs 3"""


def main(arguments: list[str]) -> None:
    """Run the program that the arguments name."""
    given = _parser().parse_args(arguments)
    adoption = Adoption(initialize=not given.no_initialize)
    adoption.install()
    try:
        if given.module:
            run_module(given.module, given.arguments)
        else:
            run_script(given.arguments[0], given.arguments[1:])
    except SystemExit as error:
        if not error.code:  # the program has succeeded
            adoption.report()
        raise
    adoption.report()


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m requestzero.run",
        usage="%(prog)s [--no-initialize] (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--no-initialize", action="store_true", help="leave deepspeed.initialize, where the program calls it, as it is"
    )
    parser.add_argument("-m", dest="module", metavar="MODULE", help="run a module, as python -m does")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program and its arguments")
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that leaves everything after the program's name to the program, options too."""

    def parse_args(self, args: list[str]) -> argparse.Namespace:  # type: ignore[override]
        """Return the options before the program, its module, if it is one, and the rest."""
        own = 0
        while own < len(args) and args[own].startswith("-"):
            own += 2 if args[own] == "-m" else 1
            if args[own - 2 : own - 1] == ["-m"]:
                break
        given = super().parse_args(args[:own])
        given.arguments = args[own:]
        if given.module is None and not given.arguments:
            self.error("name a script, or a module with -m")
        return given


if __name__ == "__main__":
    main(sys.argv[1:])
