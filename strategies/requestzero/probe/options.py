"""The options of ``python -m requestzero.probe``; everything is checked before a process starts."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from requestzero.config.suggestion import did_you_mean
from requestzero.probe.grid import Configuration, grid
from requestzero.probe.models import ModelChoice

COLUMNS = {
    "updates": "updates",
    "precision": "precision",
    "memory": "memory",
    "copies": "costs",
    "reads": "costs",
    "operators": "costs",
    "times": "times",
}
"""What ``--columns`` takes -> the measurement that it comes from."""
STAGES = (1, 2, 3)
DTYPES = ("fp32", "bf16", "fp16")
DEFAULT_OUT = Path("outputs/probe")


@dataclass(frozen=True)
class Options:
    """Options of one run. Picklable: the ranks get them as they are."""

    ranks: int
    device: str
    model: ModelChoice
    stages: tuple[int, ...]
    dtype: str
    windows: int
    timed_windows: int
    requests: int
    columns: tuple[str, ...]
    full: bool
    only: str
    seed: int
    out: Path
    html: Path | None

    def configurations(self) -> list[Configuration]:
        """Return the configurations in the order in which they are measured."""
        dtypes = tuple(d for d in DTYPES if d != "fp16" or self.device == "cuda") if self.full else (self.dtype,)
        return [each for each in grid(self.stages, dtypes, full=self.full) if self.only in str(each)]

    def measurements(self) -> list[str]:
        """Return the measurements in their order; times last, since they need every engine at once."""
        return list(dict.fromkeys(COLUMNS[name] for name in COLUMNS if name in self.columns))

    def record(self) -> dict[str, Any]:
        """Return the options as plain values, for files."""
        texts = {name: str(value) for name, value in vars(self).items() if isinstance(value, Path)}
        return {**vars(self), **texts, "columns": list(self.columns), "model": asdict(self.model)}

    def steps(self) -> int:
        """Return the number of reports of ``measure_all``."""
        each = [name for name in self.measurements() if name != "times"]
        engines = sum(len(configuration.engines()) for configuration in self.configurations())
        return len(each) * engines + (len(self.configurations()) if "times" in self.measurements() else 0)


def parse(arguments: Sequence[str] | None = None) -> Options:
    """Return the options of a command line.

    Raises:
        SystemExit: code 2, with everything that is wrong with them on the standard error.
    """
    parser = _parser()
    given = parser.parse_args(arguments)
    problems = [*_missing_packages(given), *_range_problems(given), *_column_problems(given.columns)]
    problems += [*_device_problems(given), *_model_problems(given), *_output_problems(given)]
    if problems:
        parser.error("\n  ".join(["", *problems]) if len(problems) > 1 else problems[0])
    options = _options(given)
    if not options.configurations():
        parser.error(f"--only {options.only!r} is part of no configuration. There are: {_all_names(given)}")
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m requestzero.probe",
        description="Measures requestzero against stock DeepSpeed on this machine: wrong parameter updates, precision, "
        "memory, traffic and times, in the same processes. Exit code 0: done; 1: a rank failed; 2: bad options.",
    )
    add = parser.add_argument
    add("--ranks", type=int, help="data-parallel ranks (default: all GPUs, or 2 on the CPU)")
    add("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    add("--layers", type=int, default=8, help="of the model for memory, traffic and times (default: %(default)s)")
    add("--width", type=int, default=256, help="a layer has WIDTH x WIDTH parameters (default: %(default)s)")
    add("--model", metavar="PATH", help="directory of a Hugging Face model, in place of --layers and --width")
    add("--dtype", choices=DTYPES, default="bf16", help="of the model (default: %(default)s)")
    add("--windows", type=int, default=12, help="random windows for wrong updates (default: %(default)s)")
    add("--timed-windows", type=int, default=20, help="timed windows of each engine (default: %(default)s)")
    add("--requests", type=int, default=3, help="requests in a window, at most (default: %(default)s)")
    add("--columns", nargs="+", default=list(COLUMNS), metavar="COLUMN", help=f"of {', '.join(COLUMNS)} (default: all)")
    add("--full", action="store_true", help="all model dtypes of the device, and 16-bit masters (compiles CPUAdam)")
    add("--only", default="", metavar="TEXT", help='part of a configuration\'s name, such as "ZeRO-2 offload"')
    add("--seed", type=int, default=0, help="of the random windows (default: %(default)s)")
    add("--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help="JSON, CSV and figures (default: %(default)s)")
    add("--html", type=Path, metavar="FILE", help="also one self-contained page")
    return parser


def _options(given: argparse.Namespace) -> Options:
    device = _device(given)
    values = vars(given) | {
        "device": device,
        "ranks": given.ranks or (_gpus() if device == "cuda" else 2),
        "stages": STAGES,
        "model": ModelChoice(given.layers, given.width, given.model),
        "columns": tuple(given.columns),
    }
    return Options(**{name: values[name] for name in Options.__dataclass_fields__})


def _all_names(given: argparse.Namespace) -> str:
    return "; ".join(map(str, _options(argparse.Namespace(**vars(given) | {"only": ""})).configurations()))


def _device(given: argparse.Namespace) -> str:
    return given.device or ("cuda" if _gpus() else "cpu")


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _missing_packages(given: argparse.Namespace) -> list[str]:
    needed = {"rich": "probe", "matplotlib": "probe", "jinja2": "probe"}
    if given.model:
        needed["transformers"] = "accelerate"
    return [
        f'{package} is not installed. Run: pip install "requestzero[{extra}]"'
        for package, extra in needed.items()
        if find_spec(package) is None
    ]


def _range_problems(given: argparse.Namespace) -> list[str]:
    least = {"ranks": 1, "layers": 1, "width": 1, "windows": 1, "timed_windows": 2, "requests": 1}
    return [
        f"--{name.replace('_', '-')} {getattr(given, name)} is not allowed: give {lowest} or more."
        for name, lowest in least.items()
        if getattr(given, name) is not None and getattr(given, name) < lowest
    ]


def _column_problems(columns: list[str]) -> list[str]:
    return [
        f"--columns {name!r} does not exist.{did_you_mean(name, COLUMNS)} There are: {', '.join(COLUMNS)}."
        for name in columns
        if name not in COLUMNS
    ]


def _device_problems(given: argparse.Namespace) -> list[str]:
    problems, gpus = [], _gpus()
    if given.device == "cuda" and not gpus:
        problems.append("--device cuda is not allowed: PyTorch finds no GPU here. Leave it out, or give --device cpu.")
    if _device(given) == "cuda" and 0 < gpus < (given.ranks or 0):
        problems.append(f"--ranks {given.ranks} is not allowed: there are {gpus} GPUs, and a rank needs one.")
    if _device(given) == "cpu" and given.dtype == "fp16":
        problems.append("--dtype fp16 is not allowed on the CPU: DeepSpeed refuses it there. Give bf16 or fp32.")
    return problems


def _model_problems(given: argparse.Namespace) -> list[str]:
    if given.model is None or os.path.isfile(os.path.join(given.model, "config.json")):
        return []
    wanted = "a directory with a Hugging Face model's config.json and weights"
    found = "holds no config.json" if os.path.isdir(given.model) else "does not exist"
    return [f"--model {given.model!r} {found}: give {wanted}."]


def _output_problems(given: argparse.Namespace) -> list[str]:
    problems = folder_problems("--out", given.out)
    if given.html is not None and given.html.is_dir():
        return [*problems, f"--html {str(given.html)!r} is a directory: give the page's file."]
    return problems if given.html is None else [*problems, *folder_problems("--html", given.html.parent)]


def folder_problems(option: str, folder: Path) -> list[str]:
    """Return the reasons for which ``folder`` cannot be written into, or cannot be made if it does not exist yet."""
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir():
        return [f"{option}: {str(existing)!r} is a file: give a directory, which need not exist."]
    if not os.access(existing, os.W_OK | os.X_OK):
        return [f"{option}: {str(existing)!r} is a directory that you may not write into: give another one."]
    return []
