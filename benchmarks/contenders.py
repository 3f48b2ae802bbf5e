"""The trainings that ``end_to_end.py`` compares: one model, one optimizer, one division, several ways to shard."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from contextlib import nullcontext
from typing import Any

import torch
from two_ranks import RANKS

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
        (loss / RANKS).backward()

    def weights(self) -> Weights:
        return [parameter.detach().cpu() for parameter in self.model.parameters()]


class ZeRO2(Contender):
    """DeepSpeed's engine, stock or of this package, with ZeRO-2.

    Args:
        retain: ``retain_gpu_grad_partition_until_step`` of requestzero; ``None``: stock DeepSpeed.
        bf16: a bf16 model with fp32 masters, fp32 accumulation and CPU offload; else fp32 on the device.
    """

    def __init__(self, model: torch.nn.Module, lr: float, retain: bool | None, bf16: bool) -> None:
        import deepspeed

        import requestzero

        self.stock = retain is None
        # DeepSpeed allocates the whole bucket, which by default has 500 million elements.
        zero: dict[str, Any] = {"stage": 2, "reduce_bucket_size": sum(each.numel() for each in model.parameters())}
        if bf16:
            zero["offload_optimizer"] = {"device": "cpu"}
        if retain is not None:
            zero["retain_gpu_grad_partition_until_step"] = retain
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "bf16": {"enabled": bf16},
            "data_types": {"grad_accum_dtype": "fp32"},
            "zero_optimization": zero,
            "zero_force_ds_cpu_optimizer": False,
            "managed_gradient_accumulation": not self.stock,
        }
        initialize = deepspeed.initialize if self.stock else requestzero.initialize
        self.model = initialize(model=model, optimizer=adamw(model, lr), config=config)[0]

    def forward_context(self, micro_batch: MicroBatch) -> Any:
        if not self.stock:
            if not self.model.update_window.request_open:
                self.model.begin_request(
                    micro_batch.request_id, micro_batches=micro_batch.micro_batches, window_end=micro_batch.window_end
                )
            self.model.set_gradient_accumulation_boundary(micro_batch.request_end)
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


class LightningDDP(Contender):
    """Lightning Fabric's ``DDPStrategy``: the module's gradients are reduced in the window's last backward."""

    def __init__(self, model: torch.nn.Module, lr: float, bf16: bool) -> None:
        from lightning.fabric import Fabric
        from lightning.fabric.plugins.environments import TorchElasticEnvironment

        logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
        self.fabric = Fabric(
            accelerator=device().type,
            devices=RANKS,
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
    """``torch.distributed.fsdp.fully_shard`` of every block and of the model, a reduce-scatter in every backward."""

    def __init__(self, model: torch.nn.Module, lr: float, bf16: bool) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

        options: dict[str, Any] = {"mesh": init_device_mesh(device().type, (RANKS,))}
        if bf16:
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
            options["offload_policy"] = CPUOffloadPolicy() if device().type == "cuda" else OffloadPolicy()
        for block in model.blocks:
            fully_shard(block, **options)
        self.model = fully_shard(model, **options)
        self.optimizer = adamw(self.model, lr)

    def weights(self) -> Weights:
        return [parameter.detach().to(device()).full_tensor().cpu() for parameter in self.model.parameters()]
