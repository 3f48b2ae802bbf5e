"""The doctor: what it finds in an installation and a config, and its exit status."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from requestzero.doctor import config_file, cpu_adam, requirements
from requestzero.doctor.__main__ import main
from requestzero.doctor.stock_losses import Loss, stock_run
from requestzero.environment.versions import UNPROVED, different_definitions, proved_range
from support.installed import CHANGED_STEP, pretend_deepspeed, pretend_installed
from support.paths import ROOT

LOSING = {"zero_optimization": {"stage": 2}}
SAFE = {"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


def written(folder: Path, config: dict[str, Any], name: str = "config.json") -> str:
    path = folder / name
    path.write_text(json.dumps(config))
    return str(path)


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """The JSON that ``arguments`` lead to; its status is the exit status."""
    status = main([*arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["status"] == status
    return found


def test_this_installation_is_supported(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys)
    assert found["status"] == 0
    assert found["config"] is None
    assert found["versions"]["deepspeed"] == {
        "name": "deepspeed",
        "installed": importlib.metadata.version("deepspeed"),
        "supported": proved_range(),
        "optional": False,
        "proved": True,
        "different": [],
        "different_at_stage_3": list(different_definitions(stage_3=True) or ()),
        "ok": True,
    }
    assert found["machine"]["backend"] in ("gloo", "nccl")


@pytest.mark.parametrize(
    ("name", "version"),
    [("deepspeed", None), ("torch", "2.8.0"), ("transformers", "4.57.1")],
)
def test_an_unsupported_version_is_status_4(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, version: str | None
) -> None:
    pretend_installed(monkeypatch, name, version)
    found = report(capsys)
    assert (found["status"], found["versions"][name]["ok"]) == (4, False)


def test_a_deepspeed_that_was_not_proved_is_status_4(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number is one of the range."""
    pretend_deepspeed(monkeypatch, tmp_path, CHANGED_STEP)
    found = report(capsys)
    assert (found["status"], found["versions"]["deepspeed"]["proved"]) == (4, False)
    assert found["versions"]["deepspeed"]["different"] == ["deepspeed.runtime.engine:DeepSpeedEngine.step"]


def test_what_only_an_extra_needs_may_be_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_installed(monkeypatch, "transformers", None)
    assert report(capsys)["status"] == 0


def test_a_local_build_is_its_public_version() -> None:
    assert requirements.Finding("torch", "2.13.0+cpu", ">=2.9", optional=False).ok
    assert not requirements.Finding("torch", "2.8.0+cpu", ">=2.9", optional=False).ok


def test_a_package_without_metadata_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(requirements, "DISTRIBUTION", "requestzero-is-not-here")
    assert main([]) == 4
    assert "requestzero is not installed" in capsys.readouterr().err


def test_no_compiler_and_no_ninja(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("PATH", "")
    found = cpu_adam.check_cpu_adam()
    assert (found.compiler, found.ninja, found.ok) == (None, None, False)


def test_a_lock_that_a_killed_build_has_left_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    assert report(capsys)["cpu_adam"]["lock"] == "free"
    lock = tmp_path / "cpu_adam" / "lock"
    lock.parent.mkdir()
    lock.touch()
    assert report(capsys)["cpu_adam"]["lock"] == "left behind by a process that has ended"
    main([])
    assert "is left behind by a process that has ended" in " ".join(capsys.readouterr().out.split())


def test_a_config_that_loses_is_status_3(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, written(tmp_path, LOSING))
    assert found["status"] == 3
    assert found["config"]["losses"] == {"earlier_requests": Loss.EARLIER_REQUESTS.value}
    assert found["config"]["refusal"] is None


def test_a_config_of_stage_3_loses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {"zero_optimization": {"stage": 3, "stage3_max_live_parameters": 1000}}
    found = report(capsys, written(tmp_path, config))
    assert (found["status"], found["config"]["refusal"]) == (3, None)
    assert found["config"]["losses"].keys() == {
        "late_after_first_backward",
        "absent_from_window",
        "discarded_sum",
        "first_of_two_forwards",
        "used_twice",
        "skipped_again",
    }


def test_a_config_without_loss_is_status_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, written(tmp_path, SAFE))
    assert (found["status"], found["config"]["losses"]) == (0, {})


REFUSED = {
    "stage 3": (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "zero_optimization.offload_param.device='nvme' was asked",
    ),
    "stage 0": ({}, "stage=0 was asked"),
    "unknown key": ({"zero_optimisation": {}, "zero_optimization": {"stage": 1}}, "Did you mean 'zero_optimization'"),
    "unknown ZeRO key": ({"zero_optimization": {"stage": 1, "overlap": True}}, "is no ZeRO option"),
    "wrong value": ({"zero_optimization": {"stage": 2}, "gradient_clipping": -1}, "gradient_clipping=-1"),
    "two precisions": ({**LOSING, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "are both true"),
    "precision that is no section": ({**LOSING, "bf16": True}, "bf16=True is not allowed"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_config_that_is_refused_is_status_4(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    config, message = REFUSED[name]
    found = report(capsys, written(tmp_path, config))
    assert found["status"] == 4
    assert message in found["config"]["refusal"]


UNKNOWN = {
    "stage": ({"zero_optimization": {"stage": "auto"}}, "zero_optimization.stage is 'auto'"),
    "precision": ({**LOSING, "bf16": {"enabled": "auto"}}, "bf16.enabled is 'auto'"),
    "dtype": ({**LOSING, "data_types": {"grad_accum_dtype": "fp64"}}, "grad_accum_dtype='fp64' is not allowed"),
    "zenflow": ({"zero_optimization": {"stage": 2, "zenflow": {"topk_ratio": 0.1}}}, "zenflow has a gradient path"),
    "value": ({"zero_optimization": {"stage": 7}}, "zero_optimization is not allowed"),
    "dtype in a list": ({**LOSING, "data_types": {"grad_accum_dtype": ["fp32"]}}, "is not allowed: use 'fp32'"),
    **{
        f"no section, {name}": ({**LOSING, name: "on"}, f"{name}='on' is not allowed: DeepSpeed wants a mapping")
        for name in ("zero_optimization", "bf16", "data_types", "optimizer")
    },
}


@pytest.mark.parametrize(("stage", "unknown"), [(1, "at stage 1"), (2, ""), (3, "stage=3")])
def test_what_is_not_known_of_older_releases(monkeypatch: pytest.MonkeyPatch, stage: int, unknown: str) -> None:
    """Sums in another dtype at stage 1, and stage 3, where this DeepSpeed's rules do not hold for 0.19.6."""
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    monkeypatch.delattr(DeepSpeedZeroOptimizer, "_use_compact_grad_partition_buffer", raising=False)
    config = {"zero_optimization": {"stage": stage}, "data_types": {"grad_accum_dtype": "bf16"}}
    if not unknown:
        assert stock_run(config).losses
        return
    with pytest.raises(ValueError, match=rf"{unknown}: what DeepSpeed does with it before 0\.19\.8 is not known here"):
        stock_run(config)


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_config_of_which_nothing_is_known(name: str) -> None:
    config, message = UNKNOWN[name]
    with pytest.raises(ValueError, match=message):
        stock_run(config)


def test_what_is_not_known_is_status_4(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = report(capsys, written(tmp_path, {**LOSING, "bf16": {"enabled": "auto"}}))
    assert (found["status"], found["config"]["losses"]) == (4, None)
    assert "bf16.enabled is 'auto'" in found["config"]["unknown"]


def test_the_rules_are_those_of_one_version(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_deepspeed(monkeypatch, tmp_path / "deepspeed", CHANGED_STEP)
    found = report(capsys, written(tmp_path, LOSING))
    assert (found["status"], found["config"]["losses"]) == (4, None)


def test_of_another_one_that_is_let_run_nothing_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend_deepspeed(monkeypatch, tmp_path / "deepspeed", CHANGED_STEP)
    monkeypatch.setenv(UNPROVED, "1")
    with pytest.warns(UserWarning, match="It runs since"):
        found = report(capsys, written(tmp_path, LOSING))
    assert (found["status"], found["config"]["losses"]) == (4, None)
    assert found["config"]["unknown"] == f"what it does with gradients is known of {proved_range()} only."


@pytest.mark.parametrize("text", [None, "{", "[1]"])
def test_a_file_that_cannot_be_read_is_status_4(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None
) -> None:
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 4
    assert str(path) in capsys.readouterr().err


def test_a_directory_is_told_from_what_does_not_exist(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 4
    assert "which is no file" in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "configs/accelerate").glob("zero*.yaml")), ids=lambda path: path.stem)
def test_files_of_accelerate_launch(path: Path) -> None:
    file = config_file.read_config_file(path)
    run = stock_run(file.config)
    assert (run.stage, run.offload, run.model) == (int(path.stem[4]), "offload" in path.stem, "bf16")
    assert file.refusal() is None


def test_a_file_of_accelerate_launch_that_says_it_itself(tmp_path: Path) -> None:
    deepspeed = {"zero_stage": 1, "offload_optimizer_device": "cpu", "gradient_accumulation_steps": 4}
    launch = {"distributed_type": "DEEPSPEED", "mixed_precision": "no", "deepspeed_config": deepspeed}
    run = stock_run(config_file.read_config_file(Path(written(tmp_path, launch))).config)
    assert (run.stage, run.offload, run.model) == (1, True, "fp32")


@pytest.mark.parametrize(
    ("launch", "message"),
    [
        ({"deepspeed_config": {}}, "`distributed_type` must be specified"),
        ({"distributed_type": "MULTI_GPU"}, "distributed_type=DistributedType.MULTI_GPU"),
        ({"distributed_type": "DEEPSPEED", "deepspeed_config": 3}, "deepspeed_config=3 in .* is not allowed"),
    ],
)
def test_files_of_accelerate_launch_that_are_refused(tmp_path: Path, launch: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_file.read_config_file(Path(written(tmp_path, launch)))


@pytest.mark.parametrize("with_rich", [True, False])
def test_the_report_as_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], with_rich: bool
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "requestzero.doctor.report.find_spec", lambda name: find(name) if with_rich or name != "rich" else None
    )
    assert main([written(tmp_path, LOSING)]) == 3
    text = " ".join(capsys.readouterr().out.split())
    for part in (
        f"{importlib.metadata.version('deepspeed')} (supported: {proved_range()})",
        "Only the window's last request is applied",
        "takes this config",
    ):
        assert part in text
