"""Real ``accelerate launch`` and torchrun, with every shipped config file that a CPU can run."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file

from requestzero.config.files import load_config
from support import accelerate_script
from support.class_names import optimizer_name
from support.paths import ACCELERATE_CONFIGS
from support.scripts import finish, start_module

SCRIPT = Path(accelerate_script.__file__)
NAMES = sorted(path.stem for path in ACCELERATE_CONFIGS.glob("*.yaml"))
MACHINES = ("cpu", "one_gpu", "machines", "")


def free_port() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


def launch(name: str, *arguments: str) -> tuple[str, ...]:
    return ("accelerate.commands.launch", "--config_file", str(ACCELERATE_CONFIGS / f"{name}.yaml"), *arguments)


def results(directory: Path) -> list[str]:
    return [path.read_text() for path in sorted(directory.glob("rank*.txt"))]


def expected(ranks: int, offload: bool, precision: str, optimizer: str) -> str:
    """1, 3, 2, 6, 5, 7 in windows of two micro-batches per rank: the last one is shorter on two ranks."""
    updates, weight = {1: (3, -(2 + 4 + 6)), 2: (2, -(3 + 6))}[ranks]
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return f"{ranks} {updates} {optimizer} {device} SGD {precision} {offload} [{weight}.0, "


def check(directory: Path, ranks: int, offload: bool, precision: str = "bf16", stage_3: bool = False) -> None:
    optimizer = "RequestZeROStage3Optimizer" if stage_3 else optimizer_name()
    found = results(directory)
    assert len(found) == ranks
    assert all(text.startswith(expected(ranks, offload, precision, optimizer)) for text in found), found


def test_there_is_a_file_for_every_place_and_placement() -> None:
    kinds = [f"{stage}{offload}" for stage in ("zero2", "zero3") for offload in ("", "_offload")]
    wanted = {f"{kind}{'_' * bool(place)}{place}" for kind in kinds for place in MACHINES}
    assert set(NAMES) == wanted


@pytest.mark.parametrize("name", NAMES)
def test_accelerate_reads_the_file_and_so_do_we(name: str) -> None:
    config = load_config_from_file(str(ACCELERATE_CONFIGS / f"{name}.yaml"))
    assert config.distributed_type == "DEEPSPEED"
    named = load_config(config.deepspeed_config["deepspeed_config_file"], name)
    assert named["zero_optimization"]["stage"] == int(name[len("zero")])
    assert ("offload_optimizer" in named["zero_optimization"]) == ("offload" in name)
    assert (
        (ACCELERATE_CONFIGS / f"{name}.yaml")
        .read_text()
        .splitlines()[0]
        .startswith(f"# accelerate launch --config_file configs/accelerate/{name}.yaml ")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["zero2", "zero2_offload", "zero2_cpu", "zero3_cpu", "zero3_offload_cpu"]
)  # zero2_offload_cpu: with the recipe
def test_two_processes(tmp_path: Path, name: str) -> None:
    if not name.endswith("cpu") and torch.cuda.is_available() and torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs, or none")
    finish(start_module(*launch(name, "--num_processes", "2", "--main_process_port", "0"), str(SCRIPT), str(tmp_path)))
    check(tmp_path, 2, "offload" in name, stage_3="zero3" in name)


@pytest.mark.slow
def test_two_machines(tmp_path: Path) -> None:
    """Both launchers on this machine; each starts one process."""
    address = ("--main_process_ip", "127.0.0.1", "--main_process_port", free_port(), "--num_processes", "2")
    launchers = [
        start_module(
            *launch("zero2_offload_machines", *address, "--machine_rank", str(rank)),
            str(SCRIPT),
            str(tmp_path),
            CUDA_VISIBLE_DEVICES="-1",
        )
        for rank in (0, 1)
    ]
    for process in launchers:
        finish(process)
    assert [text.split()[0] for text in results(tmp_path)] == ["2", "2"]


def test_one_process(tmp_path: Path) -> None:
    finish(start_module(*launch("zero2_offload_one_gpu", "--main_process_port", "0"), str(SCRIPT), str(tmp_path)))
    check(tmp_path, 1, True)


@pytest.mark.slow
def test_without_a_launcher(tmp_path: Path) -> None:
    finish(start_module(SCRIPT.stem, str(tmp_path), PYTHONPATH=f"{SCRIPT.parent}:{os.environ.get('PYTHONPATH', '')}"))
    check(tmp_path, 1, False, "no")


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="torchrun would have two processes share a GPU")
def test_torchrun(tmp_path: Path) -> None:
    command = ("torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    finish(start_module(*command, str(SCRIPT), str(tmp_path)))
    check(tmp_path, 2, False, "no")


@pytest.mark.slow
def test_a_contradiction_is_told_before_training(tmp_path: Path) -> None:
    """Stage and precision in both files, once agreeing and once not."""
    base: dict[str, Any] = yaml.safe_load((ACCELERATE_CONFIGS / "zero2_cpu.yaml").read_text())
    (tmp_path / "ds.yaml").write_text("zero_optimization: {stage: 2}\nbf16: {enabled: false}\n")
    base["deepspeed_config"] = {"deepspeed_config_file": str(tmp_path / "ds.yaml"), "zero_stage": 2}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(base))
    command = ("accelerate.commands.launch", "--config_file", str(tmp_path / "accelerate.yaml"))
    process = start_module(*command, "--main_process_port", "0", str(SCRIPT), str(tmp_path))
    output, _ = process.communicate(timeout=150)
    assert process.returncode != 0
    message = f"bf16.enabled is True in accelerate's mixed_precision='bf16' and False in the DeepSpeed file '{tmp_path}"
    assert f"ValueError: {message}" in output
    assert "zero_stage" not in output
