"""The diagnosis of an installation and a config, and the exit status that follows from it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from requestzero.doctor.config_file import read_config_file
from requestzero.doctor.cpu_adam import CpuAdam, check_cpu_adam
from requestzero.doctor.requirements import Finding, check_versions
from requestzero.doctor.status import Status
from requestzero.doctor.stock_losses import Loss, stock_run
from requestzero.environment.machine import Machine, describe_machine
from requestzero.environment.versions import deepspeed_is_proved, proved_range, require_supported_deepspeed


@dataclass(frozen=True)
class ConfigDiagnosis:
    """Diagnosis of a config."""

    path: str
    losses: list[Loss] | None
    """Losses of gradients in stock DeepSpeed; ``None`` if they are not known."""
    unknown: str | None
    """Reason for which they are not known."""
    refusal: str | None
    """Reason for which requestzero refuses the config; ``None`` if it does not."""


@dataclass(frozen=True)
class Diagnosis:
    """Diagnosis of an installation and, where one was given, of a config."""

    versions: list[Finding]
    machine: Machine | None
    """``None`` if DeepSpeed, which chooses the accelerator, is not installed."""
    cpu_adam: CpuAdam | None
    """``None`` likewise."""
    config: ConfigDiagnosis | None
    """``None`` if no config was given."""

    @property
    def status(self) -> Status:
        if not all(finding.ok for finding in self.versions):
            return Status.UNFIT
        if self.config is None:
            return Status.FINE
        if self.config.refusal is not None or self.config.losses is None:
            return Status.UNFIT
        return Status.LOSES if self.config.losses else Status.FINE

    def as_json(self) -> dict[str, Any]:
        """Return plain values for ``json.dumps``."""
        return {
            "status": int(self.status),
            "versions": {each.name: asdict(each) | {"ok": each.ok} for each in self.versions},
            "machine": None if self.machine is None else asdict(self.machine),
            "cpu_adam": None if self.cpu_adam is None else asdict(self.cpu_adam) | {"ok": self.cpu_adam.ok},
            "config": None if self.config is None else _config_as_json(self.config),
        }


def diagnose(path: Path | None) -> Diagnosis:
    """Diagnose this installation and, where ``path`` is given, that config. Starts and compiles nothing.

    Raises:
        ImportError: requestzero itself is not installed.
        ValueError: the config cannot be read.
        FileNotFoundError: it, or a file that it names, does not exist.
    """
    versions = check_versions()
    if any(finding.installed is None and not finding.optional for finding in versions):
        return Diagnosis(versions, None, None, None)
    config = None if path is None else diagnose_config(path)
    from deepspeed.accelerator import get_accelerator

    # One rank for every device that is there.
    machine = describe_machine(ranks=get_accelerator().device_count())
    return Diagnosis(versions, machine, check_cpu_adam(), config)


def diagnose_config(path: Path) -> ConfigDiagnosis:
    """Diagnose the config in the file ``path``; raises as :func:`diagnose`."""
    file = read_config_file(path)
    losses, unknown = None, None
    try:
        require_supported_deepspeed()
        if deepspeed_is_proved():
            losses = stock_run(file.config).losses
        else:  # it runs with the user's consent
            unknown = f"what it does with gradients is known of {proved_range()} only."
    except (ImportError, ValueError) as error:
        unknown = str(error)
    return ConfigDiagnosis(str(path), losses, unknown, file.refusal())


def _config_as_json(config: ConfigDiagnosis) -> dict[str, Any]:
    losses = None if config.losses is None else {loss.name.lower(): loss.value for loss in config.losses}
    return {**asdict(config), "losses": losses}
