"""What a program may call of a ``Trainer`` besides one ``train()``: as without DeepSpeed."""

from __future__ import annotations

import os
import signal
import time
from contextlib import nullcontext
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers import TrainerCallback

from requestzero.accelerate.preemption import AgreedPreemption
from requestzero.config.option_record import OWN_SECTIONS
from support.accelerate_state import fresh
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER
from support.tiny_llama import tiny_llama
from support.trainer import quiet, with_documented_line
from support.whole_weights import whole

AUTO: dict[str, Any] = {
    name: "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
}
STAGE_2 = {**AUTO, "bf16": {"enabled": "auto"}, "zero_optimization": {"stage": 2}}
STAGE_3 = {**STAGE_2, "zero_optimization": {"stage": 3}}
OFFLOAD = {**AUTO, **KEEP_OPTIMIZER, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
WARMUP = {"warmup_min_lr": 0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
SCHEDULER = {
    "type": "WarmupDecayLR",
    "params": {**WARMUP, "warmup_type": "linear"},
}


def make_rows(count: int = 24) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in ids]


def make_trainer(deepspeed: Any, model_init: bool = False, saved: str | None = None, **options: Any) -> Any:
    from transformers import Trainer, set_seed

    from requestzero.transformers import RequestZeROTrainingArguments

    given = {"max_steps": 3, "learning_rate": 1e-2, "logging_steps": 1, "optim": "adamw_torch", **options}
    given = quiet(per_device_train_batch_size=2, gradient_accumulation_steps=2, **given)
    if deepspeed is None:
        args = with_documented_line(None, given)
    else:
        args = RequestZeROTrainingArguments(deepspeed=deepspeed, **given)
    set_seed(0)
    model: dict[str, Any] = {"model_init": lambda: tiny_llama()} if model_init else {"model": tiny_llama()}
    if saved is not None:
        model["model"] = model["model"].from_pretrained(saved, dtype=torch.float32)
        assert all(hasattr(param, "ds_id") for param in model["model"].parameters())
    return Trainer(args=args, train_dataset=make_rows(), eval_dataset=make_rows(8), **model)


def weights(trainer: Any) -> torch.Tensor:
    with whole(trainer.model.parameters()):
        return torch.cat([p.detach().flatten().float().cpu() for p in trainer.model.parameters()])


def rates(trainer: Any) -> list[float]:
    return [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]


def arguments_of(kind: str) -> Any:
    from requestzero.transformers import RequestZeROTrainingArguments

    given = quiet(per_device_train_batch_size=2, gradient_accumulation_steps=2, optim="adamw_torch", max_steps=2)
    if kind == "plain":
        return with_documented_line(None, given)
    if kind == "plugin":
        return with_documented_line(STAGE_2, given, reduce_gradients_at="request", gradient_accumulation_steps=2)
    return RequestZeROTrainingArguments(
        deepspeed={**STAGE_2, "requestzero": {"reduce_gradients_at": "request"}}, **given
    )


def searched(kind: str) -> tuple[list[Any], int]:
    """Weights after each of two trials as ``hyperparameter_search`` runs them, and how many engines were destroyed."""
    from accelerate.utils import release_memory
    from transformers import Trainer
    from transformers.trainer_utils import HPSearchBackend

    from requestzero.zero.engine import RequestZeROEngine

    destroy = RequestZeROEngine.destroy
    with fresh(), patch.object(RequestZeROEngine, "destroy", autospec=True, side_effect=destroy) as destroying:
        trainer: Any = Trainer(args=arguments_of(kind), model_init=lambda: tiny_llama(), train_dataset=make_rows())
        trainer.hp_search_backend = HPSearchBackend.OPTUNA  # which need not be installed for this
        trainer.hp_space = attrgetter("params")
        found: list[Any] = []
        trials = {"learning_rate": 1e-2}, {"learning_rate": 3e-2, "gradient_accumulation_steps": 3}
        for number, params in enumerate(trials):
            with patch("transformers.integrations.hp_params", attrgetter("params")):
                trainer.train(trial=SimpleNamespace(number=number, params=params))
            found.append(weights(trainer))
            if kind != "plain":
                assert type(trainer.model_wrapped).__name__ == "RequestZeROEngine"
                assert trainer.model_wrapped.options.reduce_gradients_at == "request"
            if trainer.args.process_index == 0:  # and no other rank
                trainer.model_wrapped, trainer.model = release_memory(trainer.model_wrapped, trainer.model)
                trainer.accelerator.clear()
        return found, destroying.call_count


@pytest.mark.parametrize("kind", ["plugin", "arguments"])
def test_trials_of_a_hyperparameter_search(two_ranks: RankGroup, kind: str) -> None:
    """The engine of the first is destroyed when the second begins, on all ranks."""
    (expected, _), (found, destroyed) = (two_ranks.run(searched, each)[0] for each in ("plain", kind))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    assert destroyed == 1


def train_twice(deepspeed: Any, model_init: bool = False) -> list[Any]:
    with fresh():
        trainer = make_trainer(deepspeed, model_init)
        found = []
        for steps in (3, 5):
            trainer.args.max_steps = steps
            found += [trainer.train().global_step, weights(trainer), rates(trainer)]
        return found


@pytest.mark.parametrize("deepspeed", [STAGE_2, OFFLOAD, STAGE_3])
def test_train_twice(two_ranks: RankGroup, deepspeed: dict[str, Any]) -> None:
    """The second call goes on with the model and the optimizer's state, and with a new scheduler."""
    (expected, _), (found, _) = (two_ranks.run(train_twice, each) for each in (None, deepspeed))
    assert found[0::3] == expected[0::3] == [3, 5]
    assert found[2::3] == expected[2::3]
    for one, other in zip(found[1::3], expected[1::3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_train_twice_with_a_new_model(one_rank: RankGroup) -> None:
    (expected,), (found,) = (one_rank.run(train_twice, each, model_init=True) for each in (None, STAGE_2))
    torch.testing.assert_close(found[4], expected[4], rtol=1e-4, atol=1e-6)


def test_the_scheduler_of_the_config_has_no_lag(one_rank: RankGroup) -> None:
    """And begins anew in a second ``train()``. Without one, ``Trainer``'s own linear scheduler does the same."""
    (expected,), (found,) = (
        one_rank.run(scheduled, deepspeed) for deepspeed in (STAGE_2, {**STAGE_2, "scheduler": SCHEDULER})
    )
    assert found[0] == pytest.approx(expected[0])
    assert found[1] == pytest.approx(expected[1])


def scheduled(deepspeed: Any) -> list[list[float]]:
    with fresh():
        trainer = make_trainer(deepspeed, warmup_steps=2)
        found = []
        for steps in (4, 6):
            trainer.args.max_steps = steps
            trainer.train()
            found.append(rates(trainer))
        return found


def evaluated(deepspeed: Any, first: bool, bf16: bool, saved: str | None = None) -> list[Any]:
    with fresh():
        trainer = make_trainer(deepspeed, bf16=bf16, saved=saved)
        losses = [trainer.evaluate()["eval_loss"] for _ in range(2 * first)]
        trainer.train()
        return [losses, weights(trainer)]


@pytest.mark.parametrize(("deepspeed", "bf16"), [(STAGE_2, False), (STAGE_2, True), (STAGE_3, False)])
def test_evaluate_before_train(two_ranks: RankGroup, deepspeed: dict[str, Any], bf16: bool) -> None:
    """Without DeepSpeed ``evaluate`` leaves the model unwrapped, and a ``train`` after it without its other ranks."""
    plain = two_ranks.run(evaluated, None, True, bf16)[0][0]
    (found, weights), (_, expected) = (two_ranks.run(evaluated, deepspeed, first, bf16)[0] for first in (True, False))
    assert found == pytest.approx(plain, rel=1e-2 if bf16 else 1e-6)
    assert torch.equal(weights, expected)


@pytest.mark.parametrize("bf16", [False, True])
def test_evaluate_a_sharded_model_before_train(two_ranks: RankGroup, tmp_path: Path, bf16: bool) -> None:
    """One that Transformers has built, of which every rank has a part."""
    torch.manual_seed(0)
    tiny_llama().save_pretrained(tmp_path)
    (found, weights), (_, expected) = (
        two_ranks.run(evaluated, STAGE_3, first, bf16, str(tmp_path))[0] for first in (True, False)
    )
    whole_model = two_ranks.run(evaluated, STAGE_3, True, bf16)[0][0]
    assert found == pytest.approx(whole_model, rel=1e-2 if bf16 else 1e-6)
    assert torch.equal(weights, expected)


class Signalled(TrainerCallback):
    """Sends SIGTERM inside the second window, or before its step."""

    def __init__(self, trainer: Any, at: str) -> None:
        (self.manager,) = (
            each.jit_manager for each in trainer.callback_handler.callbacks if hasattr(each, "jit_manager")
        )
        self.manager.kill_wait = 0
        self.callbacks = trainer.callback_handler.callbacks
        setattr(self, at, self.send)

    def send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            (preemption,) = (each for each in self.callbacks if isinstance(each, AgreedPreemption))
            os.kill(os.getpid(), signal.SIGTERM)
            while not preemption.pending:  # which another thread sets
                time.sleep(0.01)


def preempted(
    deepspeed: Any, folder: str, at: str | None = None, signalled: tuple[int, ...] = (), resumes: bool = False
) -> list[Any]:
    """Weights of a run, of one that saves when SIGTERM comes to the ranks ``signalled``, or of the next."""
    with fresh():
        trainer = make_trainer(deepspeed, output_dir=folder, enable_jit_checkpoint=True)
        if at is not None and trainer.args.process_index in signalled:
            trainer.add_callback(Signalled(trainer, at))
        trainer.train(resume_from_checkpoint=resumes)
        return [trainer.state.global_step, weights(trainer)]


@pytest.mark.parametrize(
    ("deepspeed", "at", "signalled"),
    [
        (STAGE_2, "on_substep_end", (0, 1)),
        (STAGE_2, "on_pre_optimizer_step", (1,)),
        (OFFLOAD, "on_substep_end", (0,)),
        (STAGE_3, "on_substep_end", (1,)),
    ],
)
def test_a_checkpoint_on_sigterm(
    two_ranks: RankGroup, tmp_path: Path, deepspeed: dict[str, Any], at: str, signalled: tuple[int, ...]
) -> None:
    """Inside a window, whose batches Trainer runs again when it resumes, and at its end; on all ranks or one alone."""
    (expected, _), (plain, _) = (two_ranks.run(preempted, each, str(tmp_path)) for each in (deepspeed, None))
    found = two_ranks.run(preempted, deepspeed, str(tmp_path), at, signalled)
    assert [steps for steps, _ in found] == [2, 2]
    saved = f"checkpoint-{1 if at == 'on_substep_end' else 2}"
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == [saved]
    (found, _) = two_ranks.run(preempted, deepspeed, str(tmp_path), resumes=True)
    assert found[0] == expected[0] == 3
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[1], plain[1], rtol=1e-4, atol=1e-6)


class TurnsAround(TrainerCallback):
    """Changes gradients that Trainer has clipped."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.norms = trainer, []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, *, model: Any, **kwargs: Any) -> None:
        plugin = args.deepspeed_plugin
        with nullcontext() if plugin is None else plugin.gradients(self.trainer.accelerator):
            self.norms.append(float(sum(p.grad.double().square().sum() for p in model.parameters()) ** 0.5))
            for parameter in model.parameters():
                parameter.grad.neg_()


def turned_around(deepspeed: Any) -> tuple[list[float], torch.Tensor]:
    with fresh():
        trainer = make_trainer(deepspeed, optim="sgd", learning_rate=1.0, max_grad_norm=0.05)
        callback = TurnsAround(trainer)
        trainer.add_callback(callback)
        trainer.train()
        return callback.norms, weights(trainer)


@pytest.mark.parametrize("deepspeed", [STAGE_2, OFFLOAD])
def test_gradients_in_a_callback(two_ranks: RankGroup, deepspeed: dict[str, Any]) -> None:
    (norms, expected), (found_norms, found) = (two_ranks.run(turned_around, each)[0] for each in (None, deepspeed))
    assert norms == pytest.approx([0.05] * 3, rel=1e-3)
    assert found_norms == pytest.approx(norms, rel=1e-4)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def seen_by_others() -> list[set[str]]:
    with fresh():
        config = {**OFFLOAD, "overflow": {"on_overflow": "skip"}}
        trainer = make_trainer(config)
        trainer.train()
        plugin = trainer.accelerator.state.deepspeed_plugin
        places = plugin.deepspeed_config, plugin.hf_ds_config.config, trainer.args.hf_deepspeed_config.config
        return [set(place) & set(OWN_SECTIONS) for place in places]


def test_none_of_our_keys_is_in_the_configs_that_others_see(one_rank: RankGroup) -> None:
    assert one_rank.run(seen_by_others) == [[set()] * 3]
