"""``Trainer(plugins=[...])`` with a ``CheckpointIO``: served where a file is saved, refused where a folder is."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO

from requestzero import RequestZeROFabric
from support.failures import assert_fails
from support.lightning_parity import Net, data, trainer_of, weights
from support.ranks import RankGroup


class Named(TorchCheckpointIO):
    """Adds to what it writes."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        super().save_checkpoint({**checkpoint, "written_by": "Named"}, path, storage_options)


def fit(plugin: CheckpointIO, folder: str, weights_only: bool = False, ckpt_path: str | None = None) -> Net:
    module, checkpoint = Net(), ModelCheckpoint(folder, "x", save_weights_only=weights_only)
    trainer = trainer_of("stage2", callbacks=[checkpoint], plugins=[plugin], max_epochs=2 if ckpt_path else 1)
    trainer.fit(module, data(4), ckpt_path=ckpt_path)
    return module


def save_in_a_hook(plugin: CheckpointIO, folder: str) -> None:
    class Module(Net):
        def on_train_end(self) -> None:
            self.trainer.save_checkpoint(f"{folder}/x.ckpt")

    trainer_of("stage2", plugins=[plugin], max_epochs=1).fit(Module(), data(4))


@pytest.mark.parametrize("function", [fit, save_in_a_hook])
@pytest.mark.parametrize("plugin", [Named(), AsyncCheckpointIO(Named())])
def test_one_of_the_users_own_is_refused(
    two_ranks: RankGroup, tmp_path: Path, function: Any, plugin: CheckpointIO
) -> None:
    message = rf"^ValueError: {type(plugin).__name__} in Trainer\(plugins=...\) would be left out: a checkpoint of"
    assert_fails(two_ranks, message, function, plugin, str(tmp_path))
    assert not (tmp_path / "x.ckpt").exists()


def file_of(plugin: CheckpointIO, folder: str) -> Any:
    fit(plugin, folder, weights_only=True)
    torch.distributed.barrier()  # rank 0 writes it, in the background until its fit is over
    return torch.load(f"{folder}/x.ckpt", weights_only=False).get("written_by")


@pytest.mark.parametrize("plugin", [Named(), AsyncCheckpointIO(Named())])
def test_a_file_with_weights_goes_through_it(two_ranks: RankGroup, tmp_path: Path, plugin: CheckpointIO) -> None:
    assert two_ranks.run(file_of, plugin, str(tmp_path)) == ["Named"] * 2


def saved_and_resumed(folder: str) -> tuple[list[str], bool]:
    """The warnings of a fit, and whether its checkpoint can be resumed from."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(AsyncCheckpointIO(), folder)
        resumed = fit(AsyncCheckpointIO(), f"{folder}/again", ckpt_path=f"{folder}/x.ckpt")
    through = Net()
    trainer_of("stage2", max_epochs=2).fit(through, data(4))
    told = [str(each.message) for each in caught if "AsyncCheckpointIO" in str(each.message)]
    return told, weights(resumed) == weights(through)


def test_saving_in_the_background_is_told(two_ranks: RankGroup, tmp_path: Path) -> None:
    (first, resumes), others = two_ranks.run(saved_and_resumed, str(tmp_path))
    assert len(first) == 2  # one for each fit
    assert "AsyncCheckpointIO saves nothing in the background here: a checkpoint of RequestZeRO is a folder" in first[0]
    assert resumes
    assert others == ([], True)


def launched(plugin: CheckpointIO) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks = torch.distributed.get_world_size()
        Fabric(accelerator="cpu", devices=ranks, strategy=RequestZeROFabric(), plugins=[plugin]).launch()
    return [str(each.message) for each in caught if "AsyncCheckpointIO" in str(each.message)]


def test_under_fabric(two_ranks: RankGroup) -> None:
    assert_fails(two_ranks, r"^ValueError: Named in Fabric\(plugins=...\) would be left out", launched, Named())
    (told,), nothing = two_ranks.run(launched, AsyncCheckpointIO())
    assert "a checkpoint of RequestZeROFabric is a folder" in told
    assert not nothing
