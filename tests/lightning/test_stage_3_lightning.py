"""ZeRO 3 under Lightning: DDP's updates, sharded construction, evaluation, checkpoints, and ranks that part."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import StrategyRegistry
from torch.utils.data import DataLoader

from requestzero import AbortRequest
from requestzero.lightning import RequestZeRO
from requestzero.lightning.callback_checks import check_callbacks
from requestzero.lightning.single_file import to_single_file
from support.failures import assert_fails
from support.lightning_runs import train
from support.lightning_spec import Run
from support.ranks import RankGroup
from support.setup import KEEP_OPTIMIZER

OFFLOADED = {"stage": 3, "offload_optimizer": True, "offload_parameters": True, "config": KEEP_OPTIMIZER}


@pytest.mark.parametrize("options", [{"stage": 3}, OFFLOADED], ids=["device", "offloaded"])
def test_bit_for_bit(two_ranks: RankGroup, options: dict[str, Any]) -> None:
    """As DDP and as stage 2, with an evaluation between the epochs."""
    spec: dict[str, Any] = {"trainer": {"accumulate": 4, "max_epochs": 2}, "validate": True}
    ddp = two_ranks.run(train, Run(strategy="ddp", **spec))
    stage_2 = two_ranks.run(train, Run(**spec))
    for want, other, got in zip(ddp, stage_2, two_ranks.run(train, Run(options=options, **spec)), strict=True):
        for name in ("weights", "norm", "lr", "step", "batch"):
            assert [row[name] for row in got["updates"]] == [row[name] for row in want["updates"]]
        assert got["weights"] == want["weights"] == other["weights"]
        assert (got["calls"], got["seen"], got["logged"]) == (other["calls"], other["seen"], other["logged"])
        assert got["applied"] == got["global_step"] == want["global_step"]


class Sharded(LightningModule):
    """A module whose layer is built in ``configure_model``, sharded at stage 3."""

    def __init__(self) -> None:
        super().__init__()
        self.layer: torch.nn.Linear | None = None
        self.fail_at: int | None = None
        self.was_sharded = False

    def configure_model(self) -> None:
        if self.layer is None:
            torch.manual_seed(5)
            self.layer = torch.nn.Linear(5, 3)
            self.was_sharded = hasattr(self.layer.weight, "ds_id")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.layer is not None
        return self.layer(x).square().sum()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.fail_at and self.global_rank == 1:
            raise OSError("the disk is gone")
        return self(batch)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", self(batch), sync_dist=True)

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def batches(count: int = 4) -> DataLoader[Any]:
    return DataLoader([torch.full((2, 5), 0.25 * (number + 1)) for number in range(count)], batch_size=None)  # type: ignore[arg-type]


def trainer_of(root: Path, epochs: int, strategy: Any = None, **options: Any) -> Trainer:
    return Trainer(
        accelerator="cpu",
        devices=torch.distributed.get_world_size(),
        strategy=strategy or RequestZeRO(**options),
        max_epochs=epochs,
        accumulate_grad_batches=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=1,
        default_root_dir=root,
    )


def whole(module: Sharded) -> list[torch.Tensor]:
    import deepspeed

    with deepspeed.zero.GatheredParameters(list(module.parameters())):
        return [parameter.detach().clone() for parameter in module.parameters()]


def resumed(root: Path, options: dict[str, Any]) -> tuple[bool, list[Any]]:
    """Two epochs in one, and in two with a checkpoint between; predictions; the checkpoint in one file."""
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    whole_run, first, second = Sharded(), Sharded(), Sharded()
    trainer_of(root, 2, **options).fit(whole_run, batches(), batches(2))
    trainer = trainer_of(root, 1, **options)
    trainer.fit(first, batches(), batches(2))
    trainer.save_checkpoint(root / "saved.ckpt")
    trainer_of(root, 2, **options).fit(second, batches(), batches(2), ckpt_path=root / "saved.ckpt")
    differences = [float((a - b).abs().max()) for a, b in zip(whole(whole_run), whole(second), strict=True)]
    predictor = trainer_of(root, 1, **options)
    predicted = predictor.predict(second, batches(2))
    assert predicted is not None
    if torch.distributed.get_rank() == 0:
        convert_zero_checkpoint_to_fp32_state_dict(root / "saved.ckpt", str(root / "one.pt"))
    torch.distributed.barrier()
    state = torch.load(root / "one.pt", weights_only=False)["state_dict"]
    return whole_run.was_sharded, [*differences, len(predicted), sorted(state), tuple(state["layer.weight"].shape)]


@pytest.mark.parametrize("options", [{"stage": 3}, OFFLOADED], ids=["device", "offloaded"])
def test_sharded_modules_checkpoints_and_predictions(
    two_ranks: RankGroup, options: dict[str, Any], tmp_path: Path
) -> None:
    for sharded, found in two_ranks.run(resumed, tmp_path, options):
        assert sharded
        assert found == [0.0, 0.0, 2, ["layer.bias", "layer.weight"], (3, 5)]


def evaluated(root: Path) -> list[bool]:
    """Evaluate a folder, and the single file that is made of it; whether with the weights that were saved."""
    module, trainer = Sharded(), trainer_of(root, 1, stage=3)
    trainer.fit(module, batches(), batches(2))
    trainer.save_checkpoint(root / "saved.ckpt")
    want = whole(module)
    if torch.distributed.get_rank() == 0:
        to_single_file(root / "saved.ckpt", root / "one.ckpt")
    torch.distributed.barrier()
    found = []
    for path in ("saved.ckpt", "one.ckpt"):
        other = Sharded()
        trainer_of(root, 1, stage=3).validate(other, batches(2), ckpt_path=root / path, verbose=False)
        found.append(all(torch.equal(a, b) for a, b in zip(whole(other), want, strict=True)))
    return found


def test_evaluation_of_a_checkpoint(two_ranks: RankGroup, tmp_path: Path) -> None:
    assert two_ranks.run(evaluated, tmp_path) == [[True, True]] * 2


def hook_warnings(root: Path) -> list[Any]:
    """Fit; for each step whether a hook sees no ``p.grad``, and the number of warnings."""
    seen: list[bool] = []

    class Reading(Sharded):
        def on_before_optimizer_step(self, optimizer: Any) -> None:
            seen.append(all(parameter.grad is None for parameter in self.parameters()))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer_of(root, 1, stage=3).fit(Reading(), batches())
    texts = [str(each.message) for each in caught]
    return [seen, sum("Gradients are not available in hooks at stage 3" in text for text in texts)]


def test_hooks_see_no_gradients_and_are_told(two_ranks: RankGroup, tmp_path: Path) -> None:
    assert two_ranks.run(hook_warnings, tmp_path)[0] == [[True, True], 1]


def weights_only(root: Path, way: str) -> None:
    trainer = trainer_of(root, 1, stage=3)
    if way == "callback":
        trainer.callbacks.append(ModelCheckpoint(root, save_weights_only=True))  # type: ignore[attr-defined]
    trainer.fit(Sharded(), batches(), batches(2))
    trainer.save_checkpoint(root / "weights.ckpt", weights_only=True)


@pytest.mark.parametrize("way", ["trainer", "callback"])
def test_weights_only_is_refused(two_ranks: RankGroup, tmp_path: Path, way: str) -> None:
    message = r"^ValueError: A checkpoint with weights only is not possible at stage 3.*single_file FOLDER FILE"
    assert_fails(two_ranks, message, weights_only, tmp_path, way)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("callback", [StochasticWeightAveraging(1e-2), EMAWeightAveraging(decay=0.9)])
def test_averages_are_refused(callback: Callback) -> None:
    with pytest.raises(ValueError, match=rf"^{type(callback).__name__} is not possible at stage 3.*stage 1 or 2"):
        check_callbacks([callback], 3)
    check_callbacks([callback], 2)


def failing(root: Path) -> str:
    module = Sharded()
    module.fail_at = 1
    try:
        trainer_of(root, 1, stage=3).fit(module, batches(), batches(2))
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_training_step_that_raises_on_one_rank(tmp_path: Path) -> None:
    ranks = RankGroup(2)
    try:
        messages = ranks.run(failing, tmp_path)
    finally:
        ranks.stop()
    assert len(set(messages)) == 1
    assert messages[0].startswith("RankDisagreementError")
    assert "rank 1: failed" in messages[0]
    assert "OSError: the disk is gone" in messages[0]


def test_registered_names() -> None:
    for name, offloaded in (("request_zero_3", False), ("request_zero_3_offload", True)):
        strategy = StrategyRegistry.get(name)
        settings = strategy.settings
        assert (settings.stage, settings.offload_optimizer, settings.offload_parameters) == (3, offloaded, offloaded)
        zero = strategy.config["zero_optimization"]
        assert zero.get("offload_param", {}).get("device", "none") == ("cpu" if offloaded else "none")


class UnderCPUAdam(Sharded):
    """With the optimizer that DeepSpeed asks for under CPU offload."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        return DeepSpeedCPUAdam(self.parameters(), lr=1e-2)


def fitted(root: Path, strategy: str | None, options: dict[str, Any]) -> list[torch.Tensor]:
    module = UnderCPUAdam() if options.get("offload_optimizer") else Sharded()
    trainer_of(root, 1, strategy, **options).fit(module, batches(), batches(2))
    return whole(module)


@pytest.mark.parametrize("offloaded", [False, True])
def test_training_by_name(two_ranks: RankGroup, offloaded: bool, tmp_path: Path) -> None:
    options = {"stage": 3, "offload_optimizer": offloaded, "offload_parameters": offloaded}
    name = "request_zero_3" + "_offload" * offloaded
    by_name, by_options = (two_ranks.run(fitted, tmp_path, strategy, options)[0] for strategy in (name, None))
    assert all(torch.equal(a, b) for a, b in zip(by_name, by_options, strict=True))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 2, "offload_parameters": True}, r"offload_parameters .*does not apply at stage 2.*set stage=3"),
        ({"stage": 3, "rank_dependent_parameters": True}, r"is not possible at stage 3.*leaf modules"),
        (
            {"stage": 3, "offload_optimizer": True, "retain_gpu_grad_partition_until_step": True},
            r"has no meaning at stage 3",
        ),
        ({"stage": 3, "config": {"zero_optimization": {"mics_shard_size": 2}}}, r"mics_shard_size=2 .*MiCS"),
        ({"stage": 2, "config": {"zero_optimization": {"stage3_max_live_parameters": 1}}}, "belongs to ZeRO stage 3"),
        ({"stage": 3, "sub_group_size": 10}, r"sub_group_size=10 does not apply.*into config"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RequestZeRO(**options)
    RequestZeRO(stage=3, config={"zero_optimization": {"stage3_max_live_parameters": 1}})


class Aborting(Sharded):
    """Two layers, and a request that is aborted before, between or after them, on one rank or on both."""

    def __init__(self, place: str, alone: bool) -> None:
        super().__init__()
        self.place, self.alone = place, alone
        self.head: torch.nn.Linear | None = None

    def configure_model(self) -> None:
        super().configure_model()
        if self.head is None:
            self.head = torch.nn.Linear(3, 2)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        assert self.layer is not None
        assert self.head is not None
        aborts = batch_idx == 2 and (self.global_rank == 1 or not self.alone)
        self._abort(aborts and self.place == "before")
        hidden = self.layer(batch)
        self._abort(aborts and self.place == "between")
        loss = self.head(hidden).square().sum()
        self._abort(aborts and self.place == "after")
        return loss

    @staticmethod
    def _abort(aborts: bool) -> None:
        if aborts:
            raise AbortRequest("its reward came too late")


def aborted(root: Path, place: str, alone: bool) -> tuple[list[torch.Tensor], int, int]:
    module = Aborting(place, alone)
    config = {**KEEP_OPTIMIZER, "zero_optimization": {"stage3_param_persistence_threshold": 0}}
    trainer = trainer_of(root, 2, stage=3, abort=True, config=config)
    trainer.fit(module, batches(5))
    strategy: Any = trainer.strategy
    return whole(module), strategy.aborted_requests, strategy.applied_updates


@pytest.mark.parametrize("place", ["before", "between", "after"])
def test_one_rank_aborts_in_its_training_step(two_ranks: RankGroup, place: str, tmp_path: Path) -> None:
    """Which is a forward that gathers weights: as if both had aborted."""
    (wanted, *counts), _ = two_ranks.run(aborted, tmp_path, "after", False)
    assert counts == [2, 6]
    for found, *found_counts in two_ranks.run(aborted, tmp_path, place, True):
        assert found_counts == counts
        assert all(map(torch.equal, found, wanted))
