"""The command line of ``requestzero.checkpoint``."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from pathlib import Path

DESCRIPTION = """\
Works on the checkpoints of the engine, of Lightning, Accelerate and Trainer, and of DeepSpeed's own engine. PATH is the
folder that a run is resumed from, or a tag's own folder in it. Needs no accelerator."""

EPILOG = """\
exit status:
  0  done; inspect: the checkpoint is whole
  1  it cannot be read, converted or written
  2  wrong arguments
  3  inspect: something is missing or damaged

examples:
  python -m requestzero.checkpoint inspect last.ckpt
  python -m requestzero.checkpoint convert saved converted
  python -m requestzero.checkpoint weights saved weights.safetensors"""

FAILED, NOT_WHOLE = 1, 3


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return the exit status."""
    given = _parser().parse_args(arguments)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # only files are read, also where a GPU is busy
    try:
        with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints its progress
            text, status = _COMMANDS[given.command](given)
    except (ImportError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return FAILED
    print(text)
    return status


def _inspect(given: argparse.Namespace) -> tuple[str, int]:
    from requestzero.checkpoint.contents import read_contents
    from requestzero.checkpoint.location import locate

    found = read_contents(locate(given.path, given.tag), given.checksums)
    text = json.dumps(found.as_json(), indent=2) if given.json else "\n".join(found.lines())
    return text, 0 if found.is_whole else NOT_WHOLE


def _convert(given: argparse.Namespace) -> tuple[str, int]:
    from requestzero.checkpoint.conversion import convert
    from requestzero.checkpoint.location import locate

    convert(locate(given.path, given.tag), given.folder, given.workers)
    return f"{given.folder} can be loaded by any number of ranks.", 0


def _weights(given: argparse.Namespace) -> tuple[str, int]:
    from requestzero.checkpoint.location import locate
    from requestzero.checkpoint.single_file import write_weights

    write_weights(locate(given.path, given.tag), given.file)
    return f"{given.file} holds the fp32 weights.", 0


_COMMANDS = {"inspect": _inspect, "convert": _convert, "weights": _weights}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m requestzero.checkpoint",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds, and whether it is whole")
    convert = commands.add_parser("convert", help="write it for any number of ranks (needed at stage 3)")
    weights = commands.add_parser("weights", help="write one file with the fp32 weights")
    for command in (inspect, convert, weights):
        command.add_argument("path", type=Path, metavar="PATH", help="folder of the checkpoint")
        command.add_argument("--tag", help="tag of the checkpoint (default: what the file 'latest' names)")
    inspect.add_argument("--json", action="store_true", help="print the report as JSON")
    inspect.add_argument("--checksums", action="store_true", help="also read all files and compare their checksums")
    convert.add_argument("folder", type=Path, metavar="NEW_FOLDER", help="is written")
    convert.add_argument("--workers", type=int, default=1, help="processes that convert (default: 1)")
    weights.add_argument("file", type=Path, metavar="FILE", help="is written; safetensors if it is named so")
    return parser


if __name__ == "__main__":
    sys.exit(main())
