"""The diagnosis as text: a table with rich, or plain lines where rich (extra ``recipes``) is not installed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from requestzero.doctor.cpu_adam import CpuAdam
from requestzero.doctor.diagnosis import ConfigDiagnosis, Diagnosis, Status
from requestzero.doctor.requirements import Finding
from requestzero.environment.build_lock import LockState
from requestzero.environment.machine import installed_versions

OK, BAD, NEUTRAL = "ok", "no", ""
Row = tuple[str, str, str]
"""Subject, finding, and one of the three marks."""

SUMMARIES = {
    Status.FINE: "Nothing to be done.",
    Status.LOSES: "With this config stock DeepSpeed gets updates wrong; requestzero applies them exactly.",
    Status.UNFIT: "What is marked 'no' above has to be changed first.",
}


def show(diagnosis: Diagnosis) -> None:
    """Print the report to standard output."""
    if find_spec("rich") is None:
        for label, text, mark in rows(diagnosis):
            print(f"{mark:2}  {label}: {text}")
        print(SUMMARIES[diagnosis.status])
        return
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 1))
    for label, text, mark in rows(diagnosis):
        table.add_row(Text(mark, "green" if mark == OK else "red"), label, Text(text))
    console = Console()
    console.print(table)
    console.print(SUMMARIES[diagnosis.status], style="green" if diagnosis.status is Status.FINE else "bold red")


def rows(diagnosis: Diagnosis) -> Iterator[Row]:
    """Return the report, line by line."""
    yield from map(_version_row, diagnosis.versions)
    machine, adam = diagnosis.machine, diagnosis.cpu_adam
    if machine is not None:
        for label, text in machine.rows().items():
            if label not in machine.versions:
                yield label, text, NEUTRAL
    if adam is not None:
        yield "DeepSpeedCPUAdam", _cpu_adam_text(adam), NEUTRAL
        if adam.lock != LockState.FREE.value:
            yield "its build", _lock_text(adam), NEUTRAL
    if diagnosis.config is not None:
        yield from _config_rows(diagnosis.config)


def _cpu_adam_text(adam: CpuAdam) -> str:
    needs = f"compiler {adam.compiler or 'missing'}, ninja {adam.ninja or 'missing'}"
    if adam.ok:
        return f"can be compiled ({needs})"
    told = "" if adam.compatible else "; DeepSpeed says that the machine is not fit for it"
    return f"cannot be compiled ({needs}{told}); PyTorch's optimizers need none of it"


def _lock_text(adam: CpuAdam) -> str:
    text = f"the lock {adam.lock_path} is {adam.lock}"
    if adam.lock == LockState.ABANDONED.value:
        return f"{text}: DeepSpeed would wait for it without end. requestzero removes it; or delete the file"
    if adam.lock == LockState.UNKNOWN.value:
        return f"{text}: delete the file if nobody compiles"
    return text


def _version_row(finding: Finding) -> Row:
    missing = "not installed, which only an extra needs" if finding.optional else "not installed"
    return finding.name, f"{finding.installed or missing} (supported: {finding.supported})", _mark(finding.ok)


def _config_rows(config: ConfigDiagnosis) -> Iterator[Row]:
    stock = f"stock DeepSpeed {installed_versions()['deepspeed']}"
    yield "config", config.path, NEUTRAL
    if config.losses is None:
        yield stock, f"not known: {config.unknown}", BAD
    elif not config.losses:
        yield stock, "every update is the sum of its window", OK
    for loss in config.losses or []:
        yield stock, loss.value, BAD
    yield "requestzero", config.refusal or "takes this config", _mark(config.refusal is None)


def _mark(ok: bool) -> str:
    return OK if ok else BAD
