"""Transformers' Trainer with the request-safe optimizer, on two ranks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from support.accelerate_state import fresh
from support.checkpoint_tool import command
from support.class_names import optimizer_name
from support.failures import assert_fails
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER
from support.tiny_llama import tiny_llama
from support.trainer import quiet, with_documented_line
from support.whole_weights import whole

SPLITS = ((1, 8), (2, 4), (4, 2))
AUTO = {
    name: "auto"
    for name in (
        "train_micro_batch_size_per_gpu",
        "train_batch_size",
        "gradient_accumulation_steps",
        "gradient_clipping",
    )
}
OFFLOAD = {
    **AUTO,
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu"},
        "retain_gpu_grad_partition_until_step": True,
    },
    **KEEP_OPTIMIZER,
}


STAGE_3 = {**AUTO, "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": True}}
STAGE_3_OFFLOAD = {
    **AUTO,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu"},
        "offload_param": {"device": "cpu"},
        **dict.fromkeys(("reduce_bucket_size", "stage3_prefetch_bucket_size"), "auto"),
        "stage3_param_persistence_threshold": "auto",
    },
    **KEEP_OPTIMIZER,
}


class PlainLoss(torch.nn.Module):
    """A model that takes no loss kwargs: the mean over the tokens of its own batch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(32, 16)
        self.head = torch.nn.Linear(16, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.embedding(input_ids))
        return {"loss": torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())}


def make_model(kind: str) -> torch.nn.Module:
    from transformers import set_seed

    set_seed(0)
    if kind == "plain":
        return PlainLoss()
    return tiny_llama(longest=32)


def make_rows() -> list[dict[str, torch.Tensor]]:
    """Texts of uneven length: what a mean per micro-batch gets wrong."""
    generator = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(72):
        length = int(torch.randint(4, 12, (1,), generator=generator))
        input_ids = torch.randint(0, 32, (12,), generator=generator)
        labels = input_ids.clone()
        labels[length:] = -100
        rows.append({"input_ids": input_ids, "labels": labels})
    return rows


def train(
    micro_batch: int,
    steps: int,
    deepspeed: Any = None,
    model: str = "llama",
    how: str = "class",
    updates: int = 3,
    resume: str | None = None,
    environment: dict[str, str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """A real ``Trainer.train()``; without ``deepspeed`` under DDP."""
    from transformers import Trainer

    from requestzero.transformers import RequestZeROTrainingArguments

    with fresh(**environment or {}):
        arguments = {
            "per_device_train_batch_size": micro_batch,
            "gradient_accumulation_steps": steps,
            "max_steps": updates,
            "learning_rate": 1e-2,
            "optim": "adamw_torch",
            "logging_steps": 1,
            "max_grad_norm": 0.25,
            **options,
        }
        if how == "line" or (deepspeed is None and how == "class"):
            args = with_documented_line(deepspeed, quiet(**arguments))
        else:
            args = RequestZeROTrainingArguments(deepspeed=deepspeed, **quiet(**arguments))
        trainer = Trainer(model=make_model(model), args=args, train_dataset=make_rows())
        trainer.train(resume_from_checkpoint=resume)
        engine = getattr(trainer, "deepspeed", None)
        with whole(trainer.model.parameters()):
            weights = torch.cat([p.detach().flatten().float().cpu() for p in trainer.model.parameters()])
        return {
            "logs": [
                [entry[key] for key in ("loss", "grad_norm", "learning_rate")]
                for entry in trainer.state.log_history
                if "grad_norm" in entry
            ],
            "weights": weights,
            "optimizer": type(engine.optimizer).__name__ if engine is not None else None,
            "applied": engine.applied_updates if engine is not None else None,
            "retain": engine.options.retain_gpu_grad_partition_until_step if engine is not None else None,
        }


def close(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("deepspeed", [{**AUTO, "zero_optimization": {"stage": 1}}, OFFLOAD, STAGE_3_OFFLOAD])
def test_the_gradient_does_not_depend_on_the_split(two_ranks: RankGroup, deepspeed: dict[str, Any]) -> None:
    """Models that take ``num_items_in_batch`` (Llama)."""
    ddp = two_ranks.run(train, *SPLITS[0])[0]
    for micro_batch, steps in SPLITS:
        found = two_ranks.run(train, micro_batch, steps, deepspeed)[0]
        stage_3 = deepspeed["zero_optimization"]["stage"] == 3
        assert found["optimizer"] == ("RequestZeROStage3Optimizer" if stage_3 else optimizer_name())
        assert found["applied"] == 3
        assert found["retain"] is ("retain_gpu_grad_partition_until_step" in deepspeed["zero_optimization"])
        assert close(found["weights"], ddp["weights"])
        assert torch.allclose(torch.tensor(found["logs"]), torch.tensor(ddp["logs"]), rtol=1e-5)


@pytest.mark.parametrize(("micro_batch", "steps"), SPLITS[::2])
def test_other_models_are_trained_as_under_ddp(two_ranks: RankGroup, micro_batch: int, steps: int) -> None:
    ddp = two_ranks.run(train, micro_batch, steps, model="plain")[0]
    found = two_ranks.run(train, micro_batch, steps, {**AUTO, "zero_optimization": {"stage": 2}}, model="plain")[0]
    assert close(found["weights"], ddp["weights"])
    assert torch.allclose(torch.tensor(found["logs"]), torch.tensor(ddp["logs"]), rtol=1e-5)
    assert all(norm > 0.25 for _, norm, _ in found["logs"])  # it was clipped


def test_the_documented_line(two_ranks: RankGroup) -> None:
    with_class, with_line = (two_ranks.run(train, 2, 4, OFFLOAD, how=how)[0] for how in ("class", "line"))
    assert with_line["optimizer"] == optimizer_name()
    assert with_line["retain"] is True
    assert torch.equal(with_class["weights"], with_line["weights"])
    assert with_class["logs"] == with_line["logs"]


def test_a_yaml_file_and_grad_norm_without_clipping(two_ranks: RankGroup, tmp_path: Path) -> None:
    from omegaconf import OmegaConf

    OmegaConf.save(OmegaConf.create(OFFLOAD), tmp_path / "ds.yaml")
    found = two_ranks.run(train, 2, 4, str(tmp_path / "ds.yaml"), max_grad_norm=0.0)[0]
    assert found["retain"] is True
    assert all(norm > 0 and math.isfinite(norm) for _, norm, _ in found["logs"])


@pytest.mark.parametrize("deepspeed", [OFFLOAD, STAGE_3], ids=["stage 2", "stage 3"])
def test_a_resumed_run_ends_as_the_uninterrupted_one(
    two_ranks: RankGroup, one_rank: RankGroup, tmp_path: Path, deepspeed: dict[str, Any]
) -> None:
    """On as many ranks, and on one with as many samples per update, at stage 3 from the converted checkpoint.

    The folder of a checkpoint has the whole weights, at stage 3 too.
    """
    saving = {"save_strategy": "steps", "save_steps": 2, "output_dir": str(tmp_path)}
    uninterrupted = two_ranks.run(train, 2, 2, deepspeed, updates=4, **saving)
    resumed = two_ranks.run(train, 2, 2, deepspeed, updates=4, resume=str(tmp_path / "checkpoint-2"))
    for expected, got in zip(uninterrupted, resumed, strict=True):
        assert torch.equal(expected["weights"], got["weights"])
        assert expected["applied"] == got["applied"] == 4
    saved = tiny_llama(longest=32).from_pretrained(tmp_path / "checkpoint-4")
    weights = torch.cat([p.detach().flatten() for p in saved.parameters()])
    assert torch.equal(weights, uninterrupted[0]["weights"])
    resume = str(tmp_path / "checkpoint-2")
    if deepspeed is STAGE_3:
        resume = str(tmp_path / "converted")
        assert one_rank.run(command, "convert", str(tmp_path / "checkpoint-2"), resume)[0][0] == 0
    (alone,) = one_rank.run(train, 2, 4, deepspeed, updates=4, resume=resume)
    assert alone["applied"] == 4
    assert close(alone["weights"], uninterrupted[0]["weights"])


def divided_twice() -> None:
    from transformers import Trainer

    with fresh():
        args = with_documented_line({**AUTO, "zero_optimization": {"stage": 2}}, quiet(), normalization="token")
        Trainer(model=make_model("llama"), args=args, train_dataset=make_rows()).train()


def test_trainer_divides_by_tokens_itself(two_ranks: RankGroup) -> None:
    message = r"^ValueError: .*Transformers' Trainer does, which takes the mean over tokens itself .*would divide once"
    assert_fails(two_ranks, message, divided_twice)


def searched() -> list[str]:
    """A hyperparameter search builds a stock plugin anew and puts it into the arguments."""
    from accelerate.utils import DeepSpeedPlugin

    from requestzero.transformers import RequestZeROTrainingArguments

    with fresh():
        args = RequestZeROTrainingArguments(deepspeed=OFFLOAD, **quiet())
        first = args.deepspeed_plugin
        args.deepspeed_plugin = DeepSpeedPlugin(hf_ds_config=args.hf_deepspeed_config)
        return [type(plugin).__name__ for plugin in (first, args.deepspeed_plugin)]


def test_a_stock_plugin_that_is_put_in_later_becomes_ours(two_ranks: RankGroup) -> None:
    assert two_ranks.run(searched) == [["RequestZeROPlugin"] * 2] * 2


def test_the_files_of_accelerate_launch(two_ranks: RankGroup) -> None:
    environment = {
        "ACCELERATE_USE_DEEPSPEED": "true",
        "ACCELERATE_DEEPSPEED_CONFIG_FILE": "pkg://requestzero.configs/accelerate/deepspeed/zero2_offload.yaml",
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2",
        "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file,zero_stage",
    }
    found = two_ranks.run(train, 2, 4, how="launched", environment=environment)[0]
    expected = two_ranks.run(train, 2, 4, OFFLOAD)[0]
    assert (found["optimizer"], found["retain"]) == (optimizer_name(), False)
    assert torch.equal(found["weights"], expected["weights"])


def test_without_any_deepspeed_config(two_ranks: RankGroup) -> None:
    message = r"^ValueError: RequestZeROTrainingArguments has no deepspeed=... and the ranks were not launched with"
    assert_fails(two_ranks, message, train, 2, 4, how="launched")
