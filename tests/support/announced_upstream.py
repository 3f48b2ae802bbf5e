"""DeepSpeed's ZeRO-1/2 optimizer with the changes that its pull requests 8949 and 9044 announce, in our own words.

Their texts say: a request boundary no longer clears ``all_grad_tensors``; the first use of a parameter in a window
refreshes its host accumulator, which a window of one backward does not need; with CPU offload and fp32 accumulation on
a 16-bit model the partition is published at request boundaries, its overflow found in what the host gradient gets, and
freed and restored for the next backward where the host gradient gives it back bit for bit, unless the option, which
DeepSpeed's config knows, keeps it. A release that has them cannot be installed here; this stands in for it on top of
the installed one.
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


def owned(optimizer: Any, param: Any, flat: torch.Tensor) -> torch.Tensor:
    """Return the part of a partition that holds a parameter's sum."""
    _, _, offset, numel = optimizer.grad_position[optimizer.get_param_id(param)]
    return flat.view(-1).narrow(0, offset, numel)


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
            host = optimizer.single_partition_of_fp32_groups[index].grad
            for param in optimizer.params_in_partition[index]:
                if optimizer.get_param_id(param) in optimizer._offload_accumulated_param_ids:
                    original["copy_grads_in_partition"](optimizer, param, index)
                    optimizer.update_offload_overflow_tracker(owned(optimizer, param, host))
            if host.dtype == torch.float32 and not optimizer.retains:  # a 16-bit one has rounded the sum
                optimizer._wait_for_offload_copies()
                optimizer.averaged_gradients[index] = None

        def _build_compact_grad_partition_buffer(optimizer: Any, index: int) -> Any:
            buffer = original["_build_compact_grad_partition_buffer"](optimizer, index)
            for param in optimizer.params_in_partition[index] if optimizer.cpu_offload else ():
                if optimizer.get_param_id(param) in optimizer._offload_accumulated_param_ids:
                    restore(optimizer, index, param, buffer.flat_partition)
            return buffer

        def restore(optimizer: Any, index: int, param: Any, flat: torch.Tensor) -> None:
            host = optimizer.single_partition_of_fp32_groups[index].grad
            owned(optimizer, param, flat).copy_(owned(optimizer, param, host))

        def copy_grads_in_partition(optimizer: Any, param: Any, group_idx: int | None = None) -> None:
            index = optimizer._get_param_group_idx(param) if group_idx is None else group_idx
            if not optimizer.cpu_offload or optimizer._use_compact_grad_partition_buffer(index):
                original["copy_grads_in_partition"](optimizer, param, index)
                return
            accumulate(optimizer, param, index)
            if optimizer.is_gradient_accumulation_boundary():
                optimizer.set_norm_for_param_grad_in_gpu(param)
                optimizer.update_offload_overflow_tracker_for_param_grad(param)
                optimizer.async_inplace_copy_grad_to_fp32_buffer_from_gpu(param)

        def accumulate(optimizer: Any, param: Any, index: int) -> None:
            """Bring the host accumulator up to date, but for a parameter whose only gradient so far is published."""
            param_id, used = optimizer.get_param_id(param), optimizer._offload_accumulated_param_ids
            published = vars(optimizer).setdefault("only_published", set())
            is_first, ends = param_id not in used, optimizer.is_gradient_accumulation_boundary()
            used.add(param_id)
            if is_first and ends:
                published.add(param_id)
                return
            if param_id in published:
                refresh(optimizer, param, index)
                published.remove(param_id)
            with patch.object(optimizer, "micro_step_id", int(not is_first)):  # 0 stores, 1 adds to what is stored
                optimizer.async_accumulate_grad_in_cpu_via_gpu(param)

        def refresh(optimizer: Any, param: Any, index: int) -> None:
            """Let the host accumulator hold what has been published: this rank's part, which alone is read."""
            if optimizer.low_precision_master_weights_and_grads:
                return  # it is the host gradient itself
            param_id = optimizer.get_param_id(param)
            buffer = torch.zeros(param.numel(), dtype=param.dtype, device=optimizer.device)
            _, start, _, numel = optimizer.grad_position[param_id]
            host = optimizer.single_partition_of_fp32_groups[index].grad
            buffer.narrow(0, start, numel).copy_(owned(optimizer, param, host))
            optimizer.accumulated_grads_in_cpu[param_id] = buffer

        def step(optimizer: Any, closure: Any = None) -> None:
            original["step"](optimizer, closure)
            vars(optimizer).pop("only_published", None)
            for index in range(len(optimizer.bit16_groups)):
                optimizer.all_grad_tensors[index] = None
                optimizer.averaged_gradients[index] = None  # also of a window that was skipped

        self.get_flat_partition = get_flat_partition
        self.independent_gradient_partition_epilogue = independent_gradient_partition_epilogue
        self._build_compact_grad_partition_buffer = _build_compact_grad_partition_buffer
        self.copy_grads_in_partition = copy_grads_in_partition
        self.step = step
