"""Memory of gradients on the accelerator, over the micro-batches of one window."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Protocol

import torch
from typing_extensions import override

from requestzero.probe.counters import Allocations, host_memory
from requestzero.probe.engines import announce, built
from requestzero.probe.grid import Configuration, Engine
from requestzero.probe.models import ModelChoice

_LATE = 0.2
"""Seconds after which gloo's threads have let go of tensors: a little later than a reduction is done."""

SIZES = (2, 3, 1)
"""Micro-batches of the first requests of a window; then from the start again."""


class Meter(Protocol):
    """Bytes in use now, and at most since ``start``."""

    def watch(self) -> AbstractContextManager[Any]:
        """Follow allocations while the block runs."""

    def start(self, training: Any) -> None:
        """Start anew, before the window that is measured."""

    def bytes_in_use(self) -> int: ...

    def peak(self) -> int: ...


class CudaMeter:
    """All memory that PyTorch's allocator has given out on this rank's device, weights included."""

    def __init__(self) -> None:
        gc.collect()  # earlier engines

    @contextmanager
    def watch(self) -> Iterator[None]:
        yield

    def start(self, training: Any) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()

    def bytes_in_use(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        return torch.cuda.max_memory_allocated()


class FloatingPoint(Allocations):
    """Tracks floating-point memory only: the integers that ranks compare are no gradients."""

    @override
    def counts(self, tensor: torch.Tensor) -> bool:
        return super().counts(tensor) and tensor.is_floating_point()


class CpuMeter:
    """Storages that operators have made since the engine's construction, whatever holds them.

    Left out is what is no gradient on the device: weights, master weights, optimizer states and, with CPU offload, what
    lies in host memory, and the two buffers of one parameter's size that both engines have at all times.
    """

    def __init__(self) -> None:
        self._allocations = FloatingPoint()

    def watch(self) -> Allocations:
        return self._allocations

    def start(self, training: Any) -> None:
        self._allocations.ignore(_no_gradients(training))
        self._allocations.ignore(host_memory(training))
        time.sleep(_LATE)
        self._allocations.restart_peak()

    def bytes_in_use(self) -> int:
        time.sleep(_LATE)
        return self._allocations.bytes_in_use

    def peak(self) -> int:
        return self._allocations.peak_bytes


def _no_gradients(training: Any) -> list[torch.Tensor]:
    optimizer = training.optimizer
    found = [*training.module.parameters(), *training.module.buffers()]
    for group in optimizer.optimizer.param_groups:
        found += group["params"]
    if training.zero_optimization_stage() == 3:
        found += [*optimizer.fp32_partitioned_groups_flat, *(param.ds_tensor for param in training.module.parameters())]
    for state in optimizer.optimizer.state.values():
        found += [each for each in state.values() if isinstance(each, torch.Tensor)]
    if getattr(optimizer, "cpu_offload", False):
        found += optimizer.param_buffer_of_bit16_for_cpu_offload_groups  # updated weights on their way to the device
        found += [optimizer.temp_grad_buffer_for_cpu_offload, optimizer.temp_grad_buffer_for_gpu_offload]
    return found


def request_sizes(requests: int) -> list[int]:
    """Return the micro-batches of each request of the windows for memory and times."""
    return [SIZES[i % len(SIZES)] for i in range(requests)]


def measure_memory(
    configuration: Configuration, engine: Engine, model: ModelChoice, requests: int
) -> dict[str, int | list[int]]:
    """Measure the bytes on this rank over the second window of ``requests`` requests (collective).

    ``memory``: after every micro-batch. ``bytes_between_requests``: the most after a request's end.
    ``bytes_at_peak``: the most at any time of the window, activations included.
    """
    meter: Meter = CudaMeter() if _on_cuda() else CpuMeter()
    with ExitStack() as stack:
        with meter.watch():
            training = stack.enter_context(built(configuration, engine, model.build(), lr=1e-6))
        _window(training, model, requests, meter.watch, lambda: 0)
        meter.start(training)
        memory, ends = _window(training, model, requests, meter.watch, meter.bytes_in_use)
        return {"memory": memory, "bytes_between_requests": max(ends), "bytes_at_peak": meter.peak()}


def _on_cuda() -> bool:
    from deepspeed.accelerator import get_accelerator

    return bool(get_accelerator().device_name() == "cuda")


def _window(
    training: Any,
    model: ModelChoice,
    requests: int,
    watch: Callable[[], AbstractContextManager[Any]],
    bytes_in_use: Callable[[], int],
) -> tuple[list[int], list[int]]:
    """Run a window; return the bytes in use after every micro-batch, and after every request."""
    inputs, memory, ends = model.inputs(training), [], []
    sizes = request_sizes(requests)
    for request, size in enumerate(sizes):
        announce(training, size, window_end=request == len(sizes) - 1)
        for micro in range(size):
            training.set_gradient_accumulation_boundary(micro == size - 1)
            with watch():  # a released partition may come back at the forward's end
                training.backward(training(inputs))
            memory.append(bytes_in_use())
        ends.append(memory[-1])
    with watch():
        training.step()
    return memory, ends
