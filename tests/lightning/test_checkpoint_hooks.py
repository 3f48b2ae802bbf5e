"""Checkpoints as users of DDP expect them: hooks, averages, weights only, evaluations, one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from requestzero.lightning.module_state import has_extra_state, is_changed
from requestzero.lightning.single_file import main, to_single_file
from support.failures import assert_fails
from support.lightning_data import rank
from support.lightning_parity import Net, data, trainer_of, weights
from support.ranks import RankGroup

KINDS = ("stage1", "stage2 offload")


def saved(kind: str, module: Net, folder: str, **options: Any) -> str:
    """Fit for an epoch; the path of the checkpoint at its end."""
    callbacks = [*options.pop("callbacks", []), ModelCheckpoint(f"{folder}/{kind}", "x", **options)]
    trainer_of(kind, callbacks=callbacks, max_epochs=1).fit(module, data())
    return f"{folder}/{kind}/x.ckpt"


def average() -> list[Any]:
    return [EMAWeightAveraging(decay=0.9)]


class Programs:
    """Programs that write into a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)

    def average_resumed(self, kind: str) -> list[float]:
        path = saved(kind, Net(), self.folder, callbacks=average())
        module = Net()
        trainer_of(kind, callbacks=average()).fit(module, data(), ckpt_path=path)
        return weights(module)

    def average_tested(self, kind: str) -> list[float]:
        path = saved(kind, Net(), self.folder, callbacks=average())
        module = Net()
        trainer_of(kind).test(module, data(2), ckpt_path=path, verbose=False)
        return weights(module)

    def average_after_the_fit(self, kind: str) -> list[float]:
        """The average is the module's after the fit, and what is saved then."""
        module, path = Net(), f"{self.folder}/{kind}.ckpt"
        trainer = trainer_of(kind, callbacks=average())
        trainer.fit(module, data())
        trainer.save_checkpoint(path)
        return weights(module) + self._from_one_file(kind, path)

    def average_in_one_file(self, kind: str) -> list[float]:
        path = saved(kind, Net(), self.folder, callbacks=average())
        return self._from_one_file(kind, path)

    def _from_one_file(self, kind: str, path: str) -> list[float]:
        if kind != "ddp":
            if rank() == 0:
                main([path, f"{path}.single"])
            torch.distributed.barrier()
            path += ".single"
        return weights(Net.load_from_checkpoint(path, weights_only=False))

    def edited_when_loading(self, kind: str) -> list[float]:
        """One entry is unknown, another has been halved, a third keeps what the module has."""

        class Module(Net):
            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                checkpoint["state_dict"]["old"] = torch.zeros(1)

            def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                for name in [name for name in checkpoint["state_dict"] if name not in self.state_dict()]:
                    del checkpoint["state_dict"][name]
                checkpoint["state_dict"]["first.bias"] = checkpoint["state_dict"]["first.bias"] / 2

        path = saved(kind, Module(), self.folder)
        module = Module()
        trainer_of(kind).fit(module, data(), ckpt_path=path)
        return weights(module)

    def a_part_is_saved(self, kind: str) -> list[float]:
        class Module(Net):
            strict_loading = False

            def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
                kept = {name: value for name, value in checkpoint["state_dict"].items() if name.startswith("second")}
                checkpoint["state_dict"] = kept

        path = saved(kind, Module(), self.folder)
        module = Module()
        trainer_of(kind).test(module, data(2), ckpt_path=path, verbose=False)
        return weights(module)

    def weights_only(self, kind: str) -> list[float]:
        """One file, without optimizer state, that is evaluated and loaded like any other; also within a window."""

        class Module(Net):
            def on_train_batch_end(self, *args: Any) -> None:
                if args[2] == 1:
                    self.trainer.save_checkpoint(f"{self.folder}/inside.ckpt", weights_only=True)

        module = Module()
        module.folder = f"{self.folder}/{kind}"
        path = saved(kind, module, self.folder, save_weights_only=True)
        content = torch.load(path, weights_only=False)
        assert "optimizer_states" not in content
        tested = Net()
        trainer_of(kind).test(tested, data(2), ckpt_path=path, verbose=False)
        inside = torch.load(f"{module.folder}/inside.ckpt", weights_only=False)["state_dict"]["second.bias"]
        return [*weights(tested), *weights(Net.load_from_checkpoint(path)), *inside.tolist()]


PROGRAMS = [name for name in vars(Programs) if not name.startswith("_")]


def run_program(kind: str, name: str, folder: Path) -> list[float]:
    result: list[float] = getattr(Programs(folder), name)(kind)
    return result


@pytest.mark.parametrize("name", PROGRAMS)
def test_checkpoints(two_ranks: RankGroup, tmp_path: Path, name: str) -> None:
    reference = two_ranks.run(run_program, "ddp", name, tmp_path)
    for kind in KINDS:
        for want, got in zip(reference, two_ranks.run(run_program, kind, name, tmp_path), strict=True):
            assert got == pytest.approx(want, rel=2e-5, abs=2e-5), kind


def keys_of_weights(folder: str, averages: bool) -> tuple[bool, set[str]]:
    """Tell whether a checkpoint has a ``state_dict`` beside DeepSpeed's weights, and the names in those."""
    path = saved("stage2", Net(), folder, callbacks=average() if averages else [])
    (file,) = Path(path).glob("**/*model_states.pt")
    content = torch.load(file, weights_only=False)
    return "state_dict" in content, set(content["module"])


@pytest.mark.parametrize("averages", [False, True])
def test_a_checkpoint_holds_the_weights_once(one_rank: RankGroup, tmp_path: Path, averages: bool) -> None:
    """Also where a hook has changed them."""
    names = {*Net().state_dict()}
    assert one_rank.run(keys_of_weights, str(tmp_path), averages) == [(False, names)]


def saved_after_a_test(folder: str, weights_only: bool) -> None:
    module, trainer = Net(), trainer_of("stage2", max_epochs=1)
    trainer.fit(module, data(2))
    trainer.test(module, data(2), verbose=False)
    trainer.save_checkpoint(f"{folder}/x.ckpt", weights_only=weights_only)
    assert weights(Net.load_from_checkpoint(f"{folder}/x.ckpt")) == weights(module)


def test_a_save_after_an_evaluation(two_ranks: RankGroup, tmp_path: Path) -> None:
    message = r"^RuntimeError: An evaluation has put an engine without an optimizer.*save it before trainer.validate"
    assert_fails(two_ranks, message, saved_after_a_test, str(tmp_path), False)
    two_ranks.run(saved_after_a_test, str(tmp_path), True)


def fit_from_one_file(folder: str) -> None:
    path = saved("ddp", Net(), folder)
    trainer_of("stage2").test(Net(), data(2), ckpt_path=path, verbose=False)
    trainer_of("stage2").fit(Net(), data(2), ckpt_path=path)


def test_a_fit_does_not_resume_from_one_file(two_ranks: RankGroup, tmp_path: Path) -> None:
    message = "^ValueError: .*x.ckpt is a single file, and a fit resumes from the folder"
    assert_fails(two_ranks, message, fit_from_one_file, str(tmp_path))


def test_what_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not the folder of a checkpoint of RequestZeRO"):
        to_single_file(tmp_path, tmp_path / "x")


class WithExtraState(torch.nn.Linear):
    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return {"seen": torch.ones(3)}

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        pass


def test_extra_state_is_no_change_of_the_weights() -> None:
    module = torch.nn.Sequential(WithExtraState(2, 2))
    state_dict = module.state_dict()
    assert has_extra_state(state_dict)
    assert not is_changed(state_dict, module)
    assert is_changed({**state_dict, "0.weight": torch.zeros(2, 2)}, module)
