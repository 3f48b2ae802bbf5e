"""Gradients that a module or a callback reads, clips or changes: as under DDP."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.utilities import grad_norm
from torch.nn.utils import clip_grad_norm_

from requestzero.lightning import RequestZeRO
from support.failures import assert_fails
from support.lightning_parity import (
    OURS,
    ManualNet,
    Net,
    Program,
    assert_as_under_ddp,
    data,
    fitted,
    trainer_of,
    weights,
)
from support.ranks import RankGroup

LIMIT = 0.05


def manual_clipping(kind: str) -> list[float]:
    class Clipping(ManualNet):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

    return fitted(kind, Clipping())


def clipping_hook(kind: str) -> list[float]:
    """Clips in its own way, and not as the Trainer says: only in the first epoch."""

    class Clipping(Net):
        def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
            if self.current_epoch == 0:
                self.clip_gradients(optimizer, gradient_clip_val=LIMIT)

    return fitted(kind, Clipping(), gradient_clip_val=LIMIT, accumulate_grad_batches=2)


def clipped_and_discarded(kind: str) -> list[float]:
    """Every second batch is clipped and left out."""

    class Clipping(ManualNet):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            if batch_idx % 2:
                optimizer.step()
            else:
                self.clip_gradients(optimizer, gradient_clip_val=LIMIT, gradient_clip_algorithm="norm")
            optimizer.zero_grad()

    return fitted(kind, Clipping())


def torch_clipping(kind: str) -> list[float]:
    class Clipping(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            clip_grad_norm_(self.parameters(), LIMIT)

    return fitted(kind, Clipping(), accumulate_grad_batches=4)


def torch_clipping_in_manual_steps(kind: str) -> list[float]:
    class Clipping(ManualNet):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            clip_grad_norm_(self.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()

    return fitted(kind, Clipping())


def torch_clipping_below_the_config(kind: str) -> list[float]:
    """The DeepSpeed config clips at a smaller norm."""

    class Clipping(ManualNet):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            clip_grad_norm_(self.parameters(), LIMIT if kind == "ddp" else 100.0)
            optimizer.step()
            optimizer.zero_grad()

    if kind == "ddp":
        return fitted(kind, Clipping())
    options = OURS[kind]
    config = {**options.get("config", {}), "gradient_clipping": LIMIT}
    return fitted(kind, Clipping(), strategy=RequestZeRO(**{**options, "config": config}))


def torch_clipping_before_changes(kind: str) -> list[float]:
    class Clipping(ManualNet):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            clip_grad_norm_(self.parameters(), LIMIT)
            with nullcontext() if kind == "ddp" else self.trainer.strategy.gradients():
                self.first.weight.grad.clamp_(-LIMIT / 8, LIMIT / 8)
            optimizer.step()
            optimizer.zero_grad()

    return fitted(kind, Clipping())


def torch_clipping_by_hand(kind: str) -> list[float]:
    class Clipping(ManualNet):
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            optimizer = self.optimizers()
            self.manual_backward(self.loss(batch))
            if kind == "ddp":
                clip_grad_norm_(self.parameters(), LIMIT)
            else:
                with self.trainer.strategy.gradients():
                    clip_grad_norm_(self.parameters(), LIMIT)
            optimizer.step()
            optimizer.zero_grad()

    return fitted(kind, Clipping())


class Edits(Callback):
    """In place, by another tensor, and by none."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.first.weight.grad.mul_(0.25)
        module.first.bias.grad = torch.ones_like(module.first.bias)
        module.second.bias.grad.zero_() if trainer.current_epoch else setattr(module.second.bias, "grad", None)


def edits(kind: str) -> list[float]:
    class NoMomentum(Net):  # where a gradient of none differs from one of zero
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return fitted(kind, NoMomentum(), callbacks=[Edits()], accumulate_grad_batches=2)


def edits_through_data(kind: str) -> list[float]:
    """Clips, scales and copies in ways that autograd does not see."""

    class Clipping(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            for parameter in self.first.parameters():
                parameter.grad.data.clamp_(-0.01, 0.01)
            self.second.weight.grad.data = self.second.weight.grad.data * 0.5
            self.second.bias.grad.detach().numpy()[:] = 0.25

    return fitted(kind, Clipping(), accumulate_grad_batches=2)


def norms(kind: str) -> list[float]:
    """Lightning's own ``grad_norm``, and one's sum of gradients, over a fit with windows."""
    seen: list[float] = []

    class Reading(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.extend(float(value) for value in grad_norm(self, 2).values())
            seen.append(float(self.first.weight.grad.sum()))

    return [*fitted(kind, Reading(), accumulate_grad_batches=4), *seen]


@pytest.mark.parametrize(
    "program",
    [
        manual_clipping,
        clipped_and_discarded,
        clipping_hook,
        torch_clipping,
        torch_clipping_in_manual_steps,
        torch_clipping_below_the_config,
        torch_clipping_before_changes,
        torch_clipping_by_hand,
        edits,
        edits_through_data,
        norms,
    ],
)
def test_gradients_in_hooks(two_ranks: RankGroup, program: Program) -> None:
    assert_as_under_ddp(two_ranks, program)


def bf16_norms(stage: int) -> list[bool]:
    seen: list[bool] = []

    class Reading(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = torch.cat([p.grad.float().flatten() for p in self.parameters()]).norm()
            seen.append(self.first.weight.grad.dtype == torch.bfloat16 and bool(norm > 0))

        def on_train_batch_end(self, *args: Any) -> None:
            seen.append(all(parameter.grad is None for parameter in self.parameters()))

    strategy = RequestZeRO(stage=stage, grad_accum_dtype="fp32", normalization="sum")
    trainer_of("ddp", strategy=strategy, precision="bf16-true", max_epochs=1).fit(Reading(), data(4))
    return seen


@pytest.mark.parametrize("stage", [1, 2])
def test_with_a_sum_of_another_dtype(two_ranks: RankGroup, stage: int) -> None:
    assert two_ranks.run(bf16_norms, stage) == [[True] * 8] * 2


def gradients_without_the_option() -> list[bool]:
    seen: list[bool] = []

    class Reading(Net):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(self.first.weight.grad is None)

    trainer_of("ddp", strategy=RequestZeRO(gradients_in_hooks=False), max_epochs=1).fit(Reading(), data(2))
    return seen


def test_the_option_turns_it_off(two_ranks: RankGroup) -> None:
    assert two_ranks.run(gradients_without_the_option) == [[True, True]] * 2


class ByValue(ManualNet):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.clip_gradients(self.optimizers(), gradient_clip_val=1.0, gradient_clip_algorithm="value")


class TooEarly(ManualNet):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.clip_gradients(self.optimizers(), gradient_clip_val=1.0)
        self.manual_backward(self.loss(batch))


class InsideAWindow(Net):
    def on_after_backward(self) -> None:
        clip_grad_norm_(self.parameters(), LIMIT)


def fit_of(cls: type[Net]) -> list[float]:
    module = cls()
    windows = {"accumulate_grad_batches": 2} if module.automatic_optimization else {}
    trainer_of("stage2", **windows).fit(module, data())
    return weights(module)


@pytest.mark.parametrize(
    ("cls", "message"),
    [
        (ByValue, r"^ValueError: clip_gradients\(gradient_clip_algorithm='value'\) is not possible"),
        (TooEarly, r"^RuntimeError: A backward after self.clip_gradients"),
        (InsideAWindow, r"^RuntimeError: A backward after self.clip_gradients"),
    ],
)
def test_what_cannot_be_clipped(two_ranks: RankGroup, cls: type[Net], message: str) -> None:
    assert_fails(two_ranks, message, fit_of, cls)


def warnings_of(cls: type[Net]) -> list[str]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_of(cls)
    return [str(each.message) for each in caught]


class AfterBackward(Net):
    def on_after_backward(self) -> None:
        pass


def test_a_hook_that_comes_too_early_is_told_where_gradients_are(two_ranks: RankGroup) -> None:
    texts = two_ranks.run(warnings_of, AfterBackward)[0]
    assert sum("read and change it in on_before_optimizer_step" in text for text in texts) == 1
    assert not any("on_before_optimizer_step" in text for text in two_ranks.run(warnings_of, Net)[0])
