"""The command line of the doctor."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from requestzero.doctor.diagnosis import Status, diagnose
from requestzero.doctor.report import show

DESCRIPTION = """\
Shows the installed versions and whether they are supported, the accelerator, the backend of its ranks, and whether
DeepSpeed's Adam for CPU offload could be compiled. With CONFIG also whether stock DeepSpeed loses or doubles gradients
where requests end, on which windows, and why, and whether requestzero takes the config. Nothing is started, compiled or
changed."""

EPILOG = f"""\
exit status:
  {Status.FINE}  everything is supported, and stock DeepSpeed applies every window's sum (or no CONFIG was given)
  2  wrong arguments
  {Status.LOSES}  everything is supported, and with CONFIG stock DeepSpeed gets updates wrong
  {Status.UNFIT}  a version is not supported, or CONFIG cannot be read, or requestzero does not take it"""


def main(arguments: list[str] | None = None) -> int:
    """Print the report; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m requestzero.doctor",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config",
        metavar="CONFIG",
        type=Path,
        nargs="?",
        help="a DeepSpeed config (JSON or YAML), or a file of accelerate launch that holds or names one",
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    given = parser.parse_args(arguments)
    try:
        # DeepSpeed logs to standard output, which belongs to the report.
        with contextlib.redirect_stdout(sys.stderr):
            diagnosis = diagnose(given.config)
    except (ImportError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return Status.UNFIT
    if given.json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        show(diagnosis)
    return diagnosis.status


if __name__ == "__main__":
    sys.exit(main())
