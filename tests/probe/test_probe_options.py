"""Options of the probe: every problem is reported before a process starts, all of them at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from requestzero.probe import options as probe_options
from requestzero.probe.options import COLUMNS, parse


def errors_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        parse(arguments)
    assert end.value.code == 2
    return capsys.readouterr().err


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_options, "_gpus", lambda: 0)


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_options, "_gpus", lambda: 2)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ranks", "0"], "--ranks 0 is not allowed: give 1 or more."),
        (["--timed-windows", "1"], "--timed-windows 1 is not allowed: give 2 or more."),
        (["--columns", "memorie"], "--columns 'memorie' does not exist. Did you mean 'memory'? There are: updates,"),
        (["--device", "cuda"], "--device cuda is not allowed: PyTorch finds no GPU here."),
        (["--dtype", "fp16"], "--dtype fp16 is not allowed on the CPU: DeepSpeed refuses it there."),
        (["--model", "no/such"], "--model 'no/such' does not exist: give a directory with a Hugging Face model's"),
        (["--only", "ZeRO-4"], "--only 'ZeRO-4' is part of no configuration. There are: ZeRO-1 device, bf16/bf16;"),
    ],
)
@pytest.mark.usefixtures("no_gpu")
def test_what_cannot_work_is_told(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert message in errors_of(capsys, *arguments)


@pytest.mark.usefixtures("no_gpu")
def test_all_problems_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    text = errors_of(capsys, "--ranks", "-1", "--width", "0", "--columns", "times", "tims")
    assert all(part in text for part in ("--ranks -1", "--width 0", "Did you mean 'times'?"))


@pytest.mark.usefixtures("two_gpus")
def test_a_rank_needs_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--ranks 3 is not allowed: there are 2 GPUs, and a rank needs one." in errors_of(capsys, "--ranks", "3")
    assert parse([]).ranks == 2
    assert parse(["--dtype", "fp16"]).device == "cuda"
    assert parse(["--device", "cpu", "--ranks", "3"]).ranks == 3


def test_a_directory_without_a_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "holds no config.json" in errors_of(capsys, "--model", os.fspath(tmp_path))


def test_where_the_output_goes_is_looked_at_first(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    text = errors_of(capsys, "--out", str(tmp_path / "file"), "--html", str(tmp_path))
    assert "file' is a file: give a directory" in text
    assert "is a directory: give the page's file." in text


def test_a_folder_that_cannot_be_made_is_told_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    text = errors_of(capsys, "--out", str(tmp_path / "file/out"), "--html", str(tmp_path / "file/page.html"))
    assert text.count("file' is a file: give a directory") == 2
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert "is a directory that you may not write into" in errors_of(capsys, "--out", str(tmp_path / "new/out"))


@pytest.mark.parametrize(("package", "extra"), [("matplotlib", "probe"), ("transformers", "accelerate")])
def test_a_missing_package_names_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, package: str, extra: str
) -> None:
    monkeypatch.setattr(probe_options, "find_spec", lambda name: None if name == package else object())
    wanted = f'{package} is not installed. Run: pip install "requestzero[{extra}]"'
    assert wanted in errors_of(capsys, "--model", "somewhere")


@pytest.mark.usefixtures("no_gpu")
def test_the_defaults() -> None:
    options = parse([])
    assert (options.device, options.ranks, options.dtype) == ("cpu", 2, "bf16")
    assert options.measurements() == ["updates", "precision", "memory", "costs", "times"]
    assert len(options.configurations()) == 8 + 2
    assert options.columns == tuple(COLUMNS)


@pytest.mark.usefixtures("no_gpu")
def test_the_whole_grid() -> None:
    configurations = parse(["--full"]).configurations()
    assert len(set(configurations)) == len(configurations) == 6 + 12 + 6, "fp32, bf16, bf16 with bf16 masters"
    assert {each.masters for each in configurations} == {"fp32", "bf16"}


@pytest.mark.usefixtures("two_gpus")
def test_fp16_is_in_the_whole_grid_on_gpus() -> None:
    assert {each.model for each in parse(["--full"]).configurations()} == {"fp32", "bf16", "fp16"}


@pytest.mark.usefixtures("no_gpu")
def test_the_steps_of_the_progress_bar() -> None:
    # Two configurations: one with stock, released, retained and auto, the other with stock and requestzero.
    options = parse(["--only", "ZeRO-2 offload", "--columns", "memory", "times"])
    assert options.steps() == 4 + 2 + 2
