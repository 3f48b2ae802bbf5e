"""DeepSpeed's ZeRO-1/2 optimizer with the changes that its pull requests 8949 and 9044 announce, in our own words.

Their texts say: a request boundary no longer clears ``all_grad_tensors``; the first use of a parameter in a window
refreshes its host accumulator; with CPU offload and fp32 accumulation on a 16-bit model the partition is published and
freed at request boundaries and restored for the next backward, unless the option, which DeepSpeed's config knows, keeps
it. A release that has them cannot be installed here; this stands in for it on top of the installed one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

OPTION = "retain_gpu_grad_partition_until_step"


@contextmanager
def announced() -> Iterator[None]:
    """While the block runs, DeepSpeed's optimizer and config have the announced changes (on this rank)."""
    from deepspeed.runtime.engine import DeepSpeedEngine
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

    changed = AnnouncedMethods(DeepSpeedZeroOptimizer)
    with announced_config(), ExitStack() as stack:
        for name in changed.names:
            stack.enter_context(patch.object(DeepSpeedZeroOptimizer, name, getattr(changed, name)))
        configure = DeepSpeedEngine._configure_zero_optimizer
        stack.enter_context(patch.object(DeepSpeedEngine, "_configure_zero_optimizer", reads_option(configure)))
        yield


@contextmanager
def announced_config() -> Iterator[None]:
    """While the block runs, DeepSpeed's config of ZeRO has the option."""
    from deepspeed.runtime.zero import config
    from pydantic import create_model

    fields: Any = {OPTION: (bool, False)}
    model = create_model("DeepSpeedZeroConfig", __base__=config.DeepSpeedZeroConfig, **fields)
    with patch.object(config, "DeepSpeedZeroConfig", model):
        yield


def reads_option(configure: Any) -> Any:
    def configured(engine: Any, optimizer: Any) -> Any:
        built = configure(engine, optimizer)
        built.retains = getattr(engine._config.zero_config, OPTION)
        return built

    return configured


class AnnouncedMethods:
    """The changed methods, which call those of the installed class."""

    def __init__(self, cls: Any) -> None:
        names = (
            "independent_gradient_partition_epilogue",
            "get_flat_partition",
            "copy_grads_in_partition",
            "_build_compact_grad_partition_buffer",
            "step",
        )
        self.names = names
        original = {name: getattr(cls, name) for name in names}

        def get_flat_partition(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            index = kwargs["param_group_idx"] if "param_group_idx" in kwargs else args[5]
            kept = vars(optimizer).setdefault("sums_over_boundaries", {})
            kept[index] = optimizer.all_grad_tensors[index]
            return original["get_flat_partition"](optimizer, *args, **kwargs)

        def independent_gradient_partition_epilogue(optimizer: Any) -> None:
            original["independent_gradient_partition_epilogue"](optimizer)
            if not optimizer.is_gradient_accumulation_boundary():
                return
            optimizer.all_grad_tensors.update(vars(optimizer).pop("sums_over_boundaries", {}))
            for index in range(len(optimizer.bit16_groups)):
                if optimizer.cpu_offload and optimizer._use_compact_grad_partition_buffer(index):
                    publish(optimizer, index)

        def publish(optimizer: Any, index: int) -> None:
            for param in optimizer.params_in_partition[index]:
                if optimizer.get_param_id(param) in optimizer._offload_accumulated_param_ids:
                    original["copy_grads_in_partition"](optimizer, param, index)
            if not optimizer.retains:
                optimizer._wait_for_offload_copies()
                optimizer.averaged_gradients[index] = None

        def _build_compact_grad_partition_buffer(optimizer: Any, index: int) -> Any:
            buffer = original["_build_compact_grad_partition_buffer"](optimizer, index)
            for param in optimizer.params_in_partition[index] if optimizer.cpu_offload else ():
                if optimizer.get_param_id(param) in optimizer._offload_accumulated_param_ids:
                    restore(optimizer, index, param, buffer.flat_partition)
            return buffer

        def restore(optimizer: Any, index: int, param: Any, flat: torch.Tensor) -> None:
            _, _, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
            host = optimizer.single_partition_of_fp32_groups[index].grad.view(-1)
            flat.narrow(0, int(offset), int(numel)).copy_(host.narrow(0, int(offset), int(numel)))

        def copy_grads_in_partition(optimizer: Any, param: Any, group_idx: int | None = None) -> None:
            index = optimizer._get_param_group_idx(param) if group_idx is None else group_idx
            if not optimizer.cpu_offload or optimizer._use_compact_grad_partition_buffer(index):
                original["copy_grads_in_partition"](optimizer, param, index)
                return
            param_id, used = optimizer.get_param_id(param), optimizer._offload_accumulated_param_ids
            with patch.object(optimizer, "micro_step_id", int(param_id in used)):  # 0 stores, 1 adds to what is stored
                optimizer.async_accumulate_grad_in_cpu_via_gpu(param)
            used.add(param_id)
            if optimizer.is_gradient_accumulation_boundary():
                optimizer.set_norm_for_param_grad_in_gpu(param)
                optimizer.update_offload_overflow_tracker_for_param_grad(param)
                optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)

        def step(optimizer: Any, closure: Any = None) -> None:
            original["step"](optimizer, closure)
            for index in range(len(optimizer.bit16_groups)):
                optimizer.all_grad_tensors[index] = None

        self.get_flat_partition = get_flat_partition
        self.independent_gradient_partition_epilogue = independent_gradient_partition_epilogue
        self._build_compact_grad_partition_buffer = _build_compact_grad_partition_buffer
        self.copy_grads_in_partition = copy_grads_in_partition
        self.step = step
