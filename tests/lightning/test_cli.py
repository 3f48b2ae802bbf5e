"""LightningCLI: by registered name, by class path, from a file; wrong values before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from lightning.pytorch import LightningModule
from lightning.pytorch.cli import LightningCLI

from requestzero import OverflowSettings
from requestzero.lightning import RequestZeRO

CLASS_PATH = "requestzero.lightning.RequestZeRO"


@pytest.fixture(autouse=True)
def no_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["prog"])


def strategy_of(*arguments: str) -> RequestZeRO:
    fixed = ["--trainer.accelerator=cpu", "--trainer.devices=1", "--trainer.logger=false"]
    cli = LightningCLI(
        LightningModule,
        run=False,
        save_config_callback=None,
        seed_everything_default=False,
        args=[*fixed, *arguments],
    )
    assert isinstance(cli.trainer.strategy, RequestZeRO)
    return cli.trainer.strategy


def test_by_name() -> None:
    settings = strategy_of("--trainer.strategy=request_zero_1_offload").settings
    assert (settings.stage, settings.offload_optimizer) == (1, True)


def test_by_class_path() -> None:
    strategy = strategy_of(
        f"--trainer.strategy={CLASS_PATH}",
        "--trainer.strategy.stage=1",
        "--trainer.strategy.normalization=sum",
        "--trainer.strategy.overlap_comm=false",
        '--trainer.strategy.overflow={"check_grad_overflow": false}',
        "--trainer.precision=bf16-true",
    )
    assert (strategy.settings.stage, strategy.settings.normalization) == (1, "sum")
    assert strategy.settings.overflow == OverflowSettings(check_grad_overflow=False)
    assert strategy.config is not None
    assert strategy.config["zero_optimization"]["overlap_comm"] is False


@pytest.mark.parametrize(("written", "retain"), [("true", True), ("auto", "auto")])
def test_from_a_file(tmp_path: Path, written: str, retain: bool | str) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        f"""
trainer:
  strategy:
    class_path: {CLASS_PATH}
    init_args:
      offload_optimizer: true
      retain_gpu_grad_partition_until_step: {written}
      grad_accum_dtype: fp32
      config:
        zero_force_ds_cpu_optimizer: false
        zero_optimization: {{stage: 1, overlap_comm: false}}
"""
    )
    settings = strategy_of("--config", str(path), "--trainer.precision=bf16-true").settings
    assert (settings.stage, settings.offload_optimizer, settings.grad_accum_dtype) == (1, True, "fp32")
    assert settings.retain_gpu_grad_partition_until_step == retain


def test_parameters_that_the_parser_adds_do_not_contradict_config() -> None:
    """The file says stage 1, and the parser passes ``stage=2`` on, the default."""
    config = '{"zero_optimization": {"stage": 1}}'
    settings = strategy_of(f"--trainer.strategy={CLASS_PATH}", f"--trainer.strategy.config={config}").settings
    assert settings.stage == 1


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("stag=1", "Option 'stag' is not accepted"),
        ("stage=one", "Expected a <class 'int'>"),
        ("stage=4", "stage=4 is not allowed: use one of 1, 2, 3"),
        ("offload_parameters=true", "does not apply at stage 2, which keeps weights whole on every device"),
    ],
)
def test_wrong_values(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The parser ends the program with a message; what our constructor refuses comes as its error."""
    with pytest.raises((SystemExit, ValueError)) as raised:
        strategy_of(f"--trainer.strategy={CLASS_PATH}", f"--trainer.strategy.{argument}")
    assert message in capsys.readouterr().err + str(raised.value)
