"""Weights that a module, a hook or a callback writes during a fit count as they do under DDP."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning

from support.lightning_parity import Net, Program, assert_as_under_ddp, fitted
from support.ranks import RankGroup


def pretrained(kind: str) -> list[float]:
    class Pretrained(Net):
        def on_fit_start(self) -> None:
            self.load_state_dict({name: torch.full_like(value, 0.25) for name, value in self.state_dict().items()})

    return fitted(kind, Pretrained())


def clamped(kind: str) -> list[float]:
    """As for a critic of a Wasserstein GAN: each update's weights are clamped through ``data``."""

    class Clamped(Net):
        def on_train_batch_end(self, *args: object) -> None:
            for parameter in self.parameters():
                parameter.data.clamp_(-0.2, 0.2)

    return fitted(kind, Clamped())


def unit_rows(kind: str) -> list[float]:
    class UnitRows(Net):
        def on_train_batch_end(self, *args: object) -> None:
            with torch.no_grad():
                self.first.weight.div_(self.first.weight.norm(dim=1, keepdim=True))

    return fitted(kind, UnitRows(), accumulate_grad_batches=3)


def layer_reset(kind: str) -> list[float]:
    class Reset(Net):
        def on_train_epoch_start(self) -> None:
            if self.current_epoch == 1:
                self.second.weight.data = torch.zeros_like(self.second.weight)

    return fitted(kind, Reset())


class CopyingPruning(ModelPruning):
    """Resets to copies of the first weights: on the CPU Lightning's own trains those that it keeps."""

    @staticmethod
    def _copy_param(new: torch.nn.Module, old: torch.nn.Module, name: str) -> None:
        original = getattr(new, f"{name}_orig", None)
        (getattr(new, name) if original is None else original).data = getattr(old, name).data.clone()


def pruned(kind: str) -> list[float]:
    return fitted(kind, Net(), callbacks=[CopyingPruning("l1_unstructured", amount=0.25)], max_epochs=3)


@pytest.mark.parametrize("program", [pretrained, clamped, unit_rows, layer_reset, pruned])
def test_written_weights(two_ranks: RankGroup, program: Program) -> None:
    assert_as_under_ddp(two_ranks, program)
