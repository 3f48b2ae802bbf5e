"""Wrong command lines: every problem is reported at once, with its key, what is allowed, and the nearest key."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from requestzero.recipes import config_check, devices
from requestzero.recipes.override_check import command_problems


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    for module in (config_check, devices):
        monkeypatch.setattr(module, "count_gpus", lambda: 0)


def problems_of(command: str) -> list[str]:
    return command_problems(shlex.split(command), "lightning_sft")


GOOD = [
    "",
    "zero=stage2_offload zero.retain_gpu_grad_partition_until_step=true overflow.check_grad_overflow=true "
    "data.requests_per_update=4 trainer.max_steps=50",
    "zero=stage2_offload zero.retain_gpu_grad_partition_until_step=auto",
    "++trainer.max_steps=3 trainer.gradient_clip_val=null optimizer.lr=1e-4",
    "'hydra.run.dir=\"a b/c=d\"' hydra.job.name=train_ddp_process_1 hydra.output_subdir=null",
    "trainer.max_steps='${data.sequence_length}'",
    "--multirun trainer.devices=1 'trainer.max_steps=1,2' 'optimizer.lr=choice(0.1,0.2)'",
    "--help nonsense",
]


@pytest.mark.parametrize("command", GOOD)
def test_a_good_command_has_no_problems(command: str) -> None:
    assert problems_of(command) == []


BAD = [
    (
        "trainer.max_step=3",
        "'trainer.max_step=3' is not allowed: there is no key 'trainer.max_step'. Nearest: trainer.max_steps.",
    ),
    ("max_steps=3", "there is no key 'max_steps'. Nearest: trainer.max_steps."),
    ("hydra.run.dirr=x", "there is no key 'hydra.run.dirr'. Nearest: hydra.run.dir."),
    ("+foo=1", "'+foo=1' is not allowed: there is no key 'foo'."),
    ("++zero.foo=1", "'++zero.foo=1' is not allowed: there is no key 'zero.foo'."),
    ("+zero.foo=1", "'+zero.foo=1' is not allowed: there is no key 'zero.foo'."),
    (
        "+zero.stage=1",
        "'+zero.stage=1' is not allowed: 'zero.stage' exists and cannot be added. Leave out the +.",
    ),
    ("~zero", "'~zero' is not allowed: no key can be removed."),
    ("zero", "'zero' cannot be read: use key=value"),
    (
        "zero=stage4",
        "zero=stage4 is not allowed: use one of default, stage1, stage1_offload, stage2, stage2_offload, stage3, "
        "stage3_offload. "
        "Nearest: stage",
    ),
    ("zero.stage=abc", "zero.stage=abc is not allowed: use a whole number."),
    ("zero.stage=true", "zero.stage=true is not allowed: use a whole number."),
    ("zero.stage=null", "zero.stage=null is not allowed: use a whole number."),
    ("optimizer.lr=fast", "optimizer.lr=fast is not allowed: use a number."),
    ("trainer.devices=x", "trainer.devices=x is not allowed: use a whole number, or null."),
    ("data.shuffle=maybe", "data.shuffle=maybe is not allowed: use true or false."),
    ("data.path=[1]", "data.path=[1] is not allowed: use text, or null."),
    (
        "trainer.max_steps=1,2",
        "'trainer.max_steps=1,2' is a sweep: use one value, or --multirun on one rank.",
    ),
    ("--multirun trainer.max_steps=1,2", "--multirun is not allowed with 2 ranks"),
    ("hydra.mode=MULTIRUN", "--multirun is not allowed with 2 ranks"),
    (
        "--multirun trainer.devices=1 trainer.max_steps=1,x",
        "trainer.max_steps=x is not allowed: use a whole number.",
    ),
    ("--multirun trainer.devices=1 trainer.max_steps=1,0", "trainer.max_steps=0 is not allowed"),
    ("zero.stage=4", "zero.stage=4 is not allowed: use one of 1, 2, 3."),
    ("zero=stage2 zero.offload_parameters=true", "zero.offload_parameters=true is not allowed below stage 3"),
    (
        "zero=stage3_offload zero.retain_gpu_grad_partition_until_step=true",
        "zero_optimization.retain_gpu_grad_partition_until_step=True has no meaning at stage 3",
    ),
    (
        "zero.grad_accum_dtype=fp8",
        "zero.grad_accum_dtype='fp8' is not allowed: use one of None, 'fp32', 'bf16', 'fp16'.",
    ),
    (
        "zero=stage2 zero.retain_gpu_grad_partition_until_step=true",
        "zero.retain_gpu_grad_partition_until_step=true is not allowed without zero.offload_optimizer=true",
    ),
    (
        "zero=stage2 zero.retain_gpu_grad_partition_until_step=auto",
        "zero.retain_gpu_grad_partition_until_step=auto is not allowed without zero.offload_optimizer=true",
    ),
    (
        "zero.retain_gpu_grad_partition_until_step=always",
        "zero.retain_gpu_grad_partition_until_step='always' is not allowed: use true, false or 'auto'.",
    ),
    (
        "zero.retain_gpu_grad_partition_until_step=true precision=fp32",
        "zero.retain_gpu_grad_partition_until_step=true with precision.mode='32-true' and zero.grad_accum_dtype='fp32' "
        "has nothing to keep: use a 16-bit precision",
    ),
    (
        "zero.retain_gpu_grad_partition_until_step=true zero.grad_accum_dtype=bf16",
        "zero.grad_accum_dtype='bf16' has nothing to keep",
    ),
    (
        "overflow.loss_scale=128",
        "overflow.loss_scale=128.0 (fp16.loss_scale) scales fp16 losses, but the precision is bf16",
    ),
    ("overflow.hysteresis=0", "overflow.hysteresis=0 is not allowed: use a whole number of at least 1."),
    (
        "precision=fp16 overflow=fp16_dynamic overflow.loss_scale=8",
        "overflow.loss_scale=8.0 (fp16.loss_scale) is a static loss scale",
    ),
    (
        "precision=fp32 overflow=drop_request",
        "overflow.on_overflow='drop_request' needs overflow.check_grad_overflow=true, which is off by default in fp32",
    ),
    (
        "overflow=raise overflow.on_overflow=stop",
        "overflow.on_overflow='stop' is not allowed: use one of 'skip', 'raise'",
    ),
    ("precision=fp16", "precision.mode='16-true' is not allowed on CPU: use bf16-true or 32-true."),
    ("precision.mode=bf32", "precision.mode='bf32' is not allowed: use one of 32-true, bf16-true"),
    ("model=hugging_face", "model.path=null with no sizes is not allowed: give model.path="),
    ("model.layers=null", "model.path=null with model.width=128, model.heads=4 is not allowed"),
    ("model.path=/none", "is not allowed with model.path='/none', since it sizes the byte-level decoder"),
    ("model=hugging_face model.path=/none", "model.path='/none' is not allowed: use a directory that holds"),
    ("model.heads=3", "model.width=128 is not allowed: use a multiple of model.heads=3."),
    ("model.layers=0", "model.layers=0 is not allowed: use a number of at least 1."),
    ("data=jsonl", "data.path=null is not allowed: give data.path="),
    ("data.path=/none", "data.longest_request=6 is not allowed with data.path='/none'"),
    ("data=jsonl data.path=/none", "data.path='/none' is not allowed: use a JSONL file that exists."),
    ("data.on_bad_line=ignore", "data.on_bad_line='ignore' is not allowed: use one of stop, skip."),
    ("data.layout=flat", "data.layout='flat' is not allowed: use one of padded, packed."),
    ("data.on_long_text=own", "data.on_long_text='own' is not allowed: use one of cut, truncate, skip, stop."),
    (
        "data.on_long_text=skip",
        "data.on_long_text='skip' is not allowed with the embedded text, which is cut: use cut.",
    ),
    ("data.tokens_per_micro_batch=64", "data.tokens_per_micro_batch=64 is not allowed with data.sequence_length=128"),
    (
        "data.requests_per_update=4 data.tokens_per_update=9",
        "data.requests_per_update=4 is not allowed with data.tokens_per_update=9: give one of them.",
    ),
    ("optimizer.lr=0", "optimizer.lr=0.0 is not allowed: use a number above 0."),
    ("optimizer=cpu_adam zero=stage2", "optimizer.name='cpu_adam' needs zero.offload_optimizer=true"),
    ("trainer.max_steps=0", "trainer.max_steps=0 is not allowed: use a number of at least 1."),
    (
        "trainer.accelerator=gpu",
        "trainer.devices=1 with trainer.accelerator='gpu' is not allowed: there are 0 GPUs here",
    ),
    (
        "trainer.resume_from=/none",
        "trainer.resume_from='/none' is not allowed: use a checkpoint that exists.",
    ),
    ("seed='${nothing}'", "Interpolation key 'nothing' not found"),
    ("--config-name nothing", "Cannot find primary config 'nothing'"),
]


@pytest.mark.parametrize(("command", "message"), BAD)
def test_a_bad_command_is_told(command: str, message: str) -> None:
    assert any(message in problem for problem in problems_of(command)), problems_of(command)


def test_all_problems_are_told_at_once() -> None:
    overflow = "overflow.loss_scale=2 overflow.on_overflow=raise overflow.max_consecutive_skips=3"
    problems = problems_of(f"trainer.max_step=3 zero.stage=x +foo=1 {overflow} data=jsonl optimizer.lr=-1")
    expected = [
        "max_step'",
        "zero.stage=x",
        "'foo'",
        "optimizer.lr=-1.0",
        "overflow.loss_scale=2.0",
        "overflow.max_consecutive_skips=3 and overflow.on_overflow='raise' disagree",
        "data.path=null",
    ]
    assert len(problems) == len(expected)
    for problem, text in zip(problems, expected, strict=True):
        assert text in problem


def test_cpu_adam_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_check.shutil, "which", lambda tool: None)
    assert [re.sub(",.*", "", problem) for problem in problems_of("optimizer=cpu_adam")] == [
        "optimizer.name='cpu_adam' needs c++",
        "optimizer.name='cpu_adam' needs ninja",
    ]


def test_files_of_the_user_are_checked_as_well(tmp_path: Path) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "good.yaml").write_text("# @package _global_\ntrainer:\n  max_steps: 7\n")
    (tmp_path / "experiment" / "typo.yaml").write_text("# @package _global_\ntrainer:\n  max_step: 7\n")
    assert problems_of(f"--config-dir '{tmp_path}' +experiment=good") == []
    assert "max_step" in problems_of(f"--config-dir '{tmp_path}' +experiment=typo")[0]
    assert problems_of("--config-dir /none") == ["--config-dir /none is not allowed: use a directory that exists."]
    assert "use one of good, typo" in problems_of(f"--config-dir '{tmp_path}' +experiment=none")[0]


def test_a_launcher_decides_the_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert "with 3 ranks" in problems_of("--multirun seed=1,2")[0]
