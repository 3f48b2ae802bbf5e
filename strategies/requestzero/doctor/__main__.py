"""The command line of the doctor."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from pathlib import Path

from requestzero.doctor.diagnosis import Diagnosis, diagnose
from requestzero.doctor.report import show
from requestzero.doctor.status import Status
from requestzero.doctor.verify.result import Verification

DESCRIPTION = """\
Shows the installed versions and whether they are supported, the accelerator, the backend of its ranks, and whether
DeepSpeed's Adam for CPU offload could be compiled. With CONFIG also whether stock DeepSpeed loses or doubles gradients
where requests end, on which windows, and why, and whether requestzero takes the config. Nothing is started, compiled or
changed.

With --verify a self-test instead, of up to a minute: random windows in many configurations on two CPU ranks or all
GPUs, compared bit for bit with plain PyTorch, a skipped window, a checkpoint and a resume. On GPUs also streams, pinned
memory, "auto" and the probe, in at most 8 minutes; the result is then also in outputs/verify.json, unless --out names
another file. A DeepSpeed that was not proved is tested too."""

GPU_RESULT = Path("outputs/verify.json")
"""The file for a self-test on GPUs, unless another is given: it takes minutes, on a machine that may be gone then."""

EPILOG = f"""\
exit status:
  {Status.FINE}  everything is supported, and stock DeepSpeed applies every window's sum (or no CONFIG was given)
  2  wrong arguments
  {Status.LOSES}  everything is supported, and with CONFIG stock DeepSpeed gets updates wrong
  {Status.UNFIT}  a version is not supported, or CONFIG cannot be read, or requestzero does not take it
  {Status.WRONG}  --verify: an update is wrong, or something else of the self-test has failed"""


def main(arguments: list[str] | None = None) -> int:
    """Print the report; return the exit status."""
    parser = _parser()
    given = parser.parse_args(arguments)
    if given.verify and given.config:
        parser.error("--verify takes no CONFIG: it has configurations of its own.")
    if not given.verify and (given.out or given.device or given.all):
        parser.error("--out, --device and --all are for --verify.")
    for problem in _out_problems(given.out) if given.out else []:
        parser.error(problem)
    try:
        # DeepSpeed logs to standard output, which belongs to the report.
        with contextlib.redirect_stdout(sys.stderr):
            found = _verify(given.device, given.all) if given.verify else diagnose(given.config)
    except (ImportError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return Status.UNFIT
    _print(found, given.json)
    out = given.out or (GPU_RESULT if isinstance(found, Verification) and found.gpus else None)
    if out:
        _write(found, out)
    return found.status


def _out_problems(out: Path) -> list[str]:
    """Return why the result could not be written, which is found out before the minutes of the self-test."""
    from requestzero.probe.options import folder_problems  # imports PyTorch

    if out.is_dir():
        return [f"--out {str(out)!r} is a directory: give a file."]
    return folder_problems("--out", out.parent)


def _print(found: Diagnosis | Verification, as_json: bool) -> None:
    if as_json:
        print(json.dumps(found.as_json(), indent=2))
    elif isinstance(found, Diagnosis):
        show(found)
    else:
        print("\n".join(found.lines()))


def _write(found: Diagnosis | Verification, out: Path) -> None:
    """Write the result; what has taken minutes is printed by now, and its status stays if it cannot be written."""
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(found.as_json(), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        print(f"could not write {out}: {error}", file=sys.stderr)
    else:
        print(f"wrote {out}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
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
    parser.add_argument("--verify", action="store_true", help="run the self-test")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="of the self-test (default: all GPUs, else the CPU)")
    parser.add_argument(
        "--all", action="store_true", help="all configurations of the self-test, also where a minute is not enough"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result of the self-test as JSON")
    return parser


def _verify(device: str | None, complete: bool) -> Verification:
    from requestzero.doctor.verify.run import verify

    return verify(device, lambda text: print(text, file=sys.stderr), complete)


if __name__ == "__main__":
    sys.exit(main())
