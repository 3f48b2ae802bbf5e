"""The trainings that benchmarks compare: one model, one optimizer, one division, several ways to shard."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist

from requestzero import MicroBatch

Weights = list[torch.Tensor]


def device() -> torch.device:
    """Return the device of this rank."""
    from deepspeed.accelerator import get_accelerator

    return torch.device(get_accelerator().current_device_name())


def adamw(model: torch.nn.Module, lr: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=lr, foreach=False)


class Contender(ABC):
    """One way to train: an update is the gradient of the sum of a window's losses, averaged over ranks."""

    model: Any
    optimizer: Any

    def begin_window(self, micro_batches: list[MicroBatch]) -> None:  # noqa: B027
        """Say what comes until the next step."""

    def forward_context(self, micro_batch: MicroBatch) -> Any:
        """Return the context manager for forward and backward of a micro-batch."""
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    @abstractmethod
    def weights(self) -> Weights:
        """Return all master weights in full, on the CPU (collective)."""

    def close(self) -> None:  # noqa: B027
        """Release what would outlive the object."""


class Plain(Contender):
    """PyTorch on one process, which is given the micro-batches of all ranks."""

    def __init__(self, model: torch.nn.Module, lr: float, dtype: torch.dtype) -> None:
        self.model = model.to(device(), dtype)
        self.optimizer = adamw(self.model, lr)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / dist.get_world_size()).backward()

    def weights(self) -> Weights:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


class ZeRO(Contender):
    """DeepSpeed's engine, of this package, with ZeRO-1, 2 or 3.

    Args:
        model: the module to train.
        lr: learning rate.
        stage: of ZeRO.
        at: ``reduce_gradients_at`` (stages 1 and 2).
        retain: ``retain_gpu_grad_partition_until_step`` (likewise).
        bf16: a bf16 model with fp32 masters and fp32 accumulation; else fp32.
        offload: the optimizer runs on the CPU.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: float,
        *,
        stage: int,
        at: str | None = None,
        retain: bool = False,
        bf16: bool = False,
        offload: bool = False,
    ) -> None:
        import requestzero

        config = _deepspeed_config(model, stage, bf16, offload)
        if retain:
            config["zero_optimization"]["retain_gpu_grad_partition_until_step"] = True
        config["requestzero"] = {} if at is None else {"reduce_gradients_at": at}
        self.model = requestzero.initialize(model=model, optimizer=adamw(model, lr), config=config)[0]

    def begin_window(self, micro_batches: list[MicroBatch]) -> None:
        self._last_request = micro_batches[-1].request_id

    def forward_context(self, micro_batch: MicroBatch) -> Any:
        if not self.model.update_window.request_open:
            self.model.begin_request(
                micro_batch.request_id,
                micro_batches=micro_batch.micro_batches,
                window_end=micro_batch.request_id == self._last_request,
            )
        self.model.set_gradient_accumulation_boundary(micro_batch.request_end, window_end=bool(micro_batch.window_end))
        return nullcontext()

    def backward(self, loss: torch.Tensor) -> None:
        self.model.backward(loss)

    def step(self) -> None:
        self.model.step()

    def weights(self) -> Weights:
        from deepspeed.utils import safe_get_full_fp32_param

        return [safe_get_full_fp32_param(each).detach().cpu().clone() for each in self.model.module.parameters()]

    def close(self) -> None:
        self.model.destroy()


class StockZeRO(ZeRO):
    """DeepSpeed's own engine and optimizer.

    Args:
        model, lr, stage, bf16, offload: see ``ZeRO``.
        managed: gradient accumulation boundaries at request ends; else ``managed_gradient_accumulation: false``.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        lr: float,
        *,
        stage: int,
        managed: bool = False,
        bf16: bool = False,
        offload: bool = False,
    ) -> None:
        import deepspeed

        config = _deepspeed_config(model, stage, bf16, offload) | {"managed_gradient_accumulation": managed}
        self.model = deepspeed.initialize(model=model, optimizer=adamw(model, lr), config=config)[0]
        self._managed = managed

    def forward_context(self, micro_batch: MicroBatch) -> Any:
        if self._managed:
            self.model.set_gradient_accumulation_boundary(micro_batch.request_end)
        return nullcontext()


def _deepspeed_config(model: torch.nn.Module, stage: int, bf16: bool, offload: bool) -> dict[str, Any]:
    # DeepSpeed allocates the whole bucket, which by default has 500 million elements.
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": sum(each.numel() for each in model.parameters())}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    if stage == 3:  # else DeepSpeed keeps every weight of so small a model on every rank
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "zero_optimization": zero,
        "zero_force_ds_cpu_optimizer": False,
    }


class LightningDDP(Contender):
    """Lightning Fabric's ``DDPStrategy``: the module's gradients are reduced in the window's last backward."""

    def __init__(self, model: torch.nn.Module, lr: float, bf16: bool) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        self.fabric = Fabric(
            accelerator=device().type,
            devices=dist.get_world_size(),
            strategy="ddp",
            precision="bf16-mixed" if bf16 else "32-true",
            plugins=[TorchElasticEnvironment()],  # the ranks are there already
        )
        self.fabric.launch()
        self.model, self.optimizer = self.fabric.setup(model, adamw(model, lr))

    def forward_context(self, micro_batch: MicroBatch) -> Any:
        return self.fabric.no_backward_sync(self.model, enabled=not micro_batch.window_end)

    def backward(self, loss: torch.Tensor) -> None:
        self.fabric.backward(loss)

    def weights(self) -> Weights:
        return [parameter.detach().cpu().clone() for parameter in self.model.parameters()]


class FSDP2(Contender):
    """``torch.distributed.fsdp.fully_shard`` of every block and of the model.

    Args:
        model: the module to train.
        lr: learning rate.
        bf16: compute in bf16, reduce in fp32.
        once: a reduce-scatter in the window's last backward (``set_requires_gradient_sync``); else in every one.
    """

    def __init__(self, model: torch.nn.Module, lr: float, bf16: bool, once: bool = False) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh(device().type, (dist.get_world_size(),))}
        if bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options["offload_policy"] = CPUOffloadPolicy() if device().type == "cuda" else OffloadPolicy()
        for block in model.blocks:
            fully_shard(block, **options)
        self.model = fully_shard(model, **options)
        self.optimizer = adamw(self.model, lr)
        self._once = once

    def forward_context(self, micro_batch: MicroBatch) -> Any:
        if self._once:
            self.model.set_requires_gradient_sync(micro_batch.window_end)
        return nullcontext()

    def weights(self) -> Weights:
        return [parameter.detach().to(device()).full_tensor().cpu() for parameter in self.model.parameters()]
