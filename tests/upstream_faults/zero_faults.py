"""Faults of DeepSpeed's own ZeRO optimizers, each with the smallest window that shows it. requestzero is not used.

    export DS_ACCELERATOR=cpu TORCH_COMPILE_DISABLE=1  # Muon would be compiled for minutes
    torchrun --nproc-per-node 2 tests/upstream_faults/zero_faults.py [NAME ...]

Two weights a and b, SGD with a learning rate of 1: an update is the gradient. A micro-batch is written as the gradients
that it has, such as ``(1, 2)``, and ``(1, None)`` where b takes no part; it is the same on both ranks.
"""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import MagicMock, patch

import deepspeed
import torch
from torch.utils._python_dispatch import TorchDispatchMode

Micro = tuple[float | None, float | None]


class Weights(torch.nn.Module):
    """Two weights of four elements each."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(4))
        self.b = torch.nn.Parameter(torch.zeros(4))

    def forward(self, gradients: Micro) -> torch.Tensor:
        pairs = zip(gradients, (self.a, self.b), strict=True)
        return torch.stack([(weight * value).sum() for value, weight in pairs if value is not None]).sum()


def build(
    stage: int,
    offload: bool = False,
    module: torch.nn.Module | None = None,
    config: dict[str, Any] | None = None,
    **zero: Any,
) -> Any:
    more, module = config or {}, module or Weights()
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": stage, **({"offload_optimizer": {"device": "cpu"}} if offload else {}), **zero},
        **more,
    }
    optimizer = None if "optimizer" in config else torch.optim.SGD(module.parameters(), lr=1.0)
    return deepspeed.initialize(model=module, optimizer=optimizer, config=config)[0]


def backward(engine: Any, gradients: Micro, boundary: bool) -> None:
    engine.set_gradient_accumulation_boundary(boundary)
    engine.backward(engine(gradients))


def weights(engine: Any) -> list[float]:
    from deepspeed.utils import safe_get_full_fp32_param

    return [float(safe_get_full_fp32_param(param)[0]) for param in engine.module.parameters()]


def update(engine: Any, *requests: list[Micro]) -> list[float]:
    """Run the requests and step; return what was applied to a and b."""
    before = weights(engine)
    for request in requests:
        for position, gradients in enumerate(request):
            backward(engine, gradients, position == len(request) - 1)
    engine.step()
    return [x - y for x, y in zip(before, weights(engine), strict=True)]


Result = tuple[Any, Any]
"""What is right, and what was measured."""


def earlier_requests_are_lost() -> Result:
    """Stages 1 and 2 on the device: two requests before a step; only the last is applied."""
    return [4, 4], update(build(2), [(1, 1)], [(3, 3)])


def first_request_is_lost() -> Result:
    """CPU offload: the first request, of one micro-batch, is not in the sum that the next adds to."""
    return [4, 4], update(build(2, offload=True), [(1, 1)], [(3, 3)])


def an_older_window_is_counted() -> Result:
    """CPU offload: in the place of a window's first request stands what an older window has left."""
    engine = build(2, offload=True)
    update(engine, [(8, 8), (8, 8)])
    return [4, 4], update(engine, [(1, 1)], [(3, 3)])


def late_parameter_counts_an_older_window() -> Result:
    """CPU offload: b takes part from the second micro-batch on, and is added to what an older window has left."""
    engine = build(2, offload=True)
    update(engine, [(8, 8), (8, 8)])
    return [4, 3], update(engine, [(1, None), (3, 3)])


def absent_parameter_is_applied_again() -> Result:
    """CPU offload, one backward per step: b takes no part in the second step; its last gradient is applied again."""
    engine = build(2, offload=True)
    update(engine, [(1, 5)])
    return [2, 0], update(engine, [(2, None)])


def parameter_of_an_earlier_micro_batch_is_not_published() -> Result:
    """Stage 2 with offload: b is not in the request's last micro-batch, and its sum does not reach the host."""
    return [4, 3], update(build(2, offload=True), [(1, 3), (3, None)])


def unreduced_parameter() -> Result:
    """Stage 1 with overlap_comm: b is not in the request's last micro-batch, and is never reduced (3 is a mean)."""
    on_this_rank = 6.0 * torch.distributed.get_rank()
    return [4, 3], update(build(1, overlap_comm=True), [(1, on_this_rank), (3, None)])


def zero_grad_discards_nothing() -> Result:
    """Stage 2: gradients that ``engine.zero_grad()`` was to discard are applied."""
    engine = build(2)
    backward(engine, (8, 8), boundary=False)
    engine.zero_grad()
    return [3, 3], update(engine, [(3, 3)])


def pending_gradients_survive_a_load() -> Result:
    """Stage 2: ``load_checkpoint`` into a live engine leaves the gradients of its open window."""
    engine = build(2)
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        torch.distributed.broadcast_object_list(folders, 0)
        engine.save_checkpoint(folders[0])
        backward(engine, (8, 8), boundary=False)
        engine.load_checkpoint(folders[0])
        torch.distributed.barrier()
    return [3, 3], update(engine, [(3, 3)])


def step_without_backward() -> Result:
    """Stage 2: a step after a step raises, where there is nothing to apply."""
    engine = build(2)
    update(engine, [(1, 1)])
    try:
        return "no error", (engine.step(), "no error")[1]
    except Exception as error:
        return "no error", f"{type(error).__name__}: {error}"


def loss_of_two_forwards() -> Result:
    """Stage 2 with offload: ``loss.backward()`` of one loss of two forwards; nothing of it is applied."""
    engine = build(2, offload=True)
    engine.set_gradient_accumulation_boundary(True)
    before = weights(engine)
    (engine((1, 1)) + engine((3, 3))).backward()
    engine.step()
    return [4, 4], [x - y for x, y in zip(before, weights(engine), strict=True)]


class Four(torch.nn.Module):
    """Weights of four elements that hold 1, 2, 3, 4."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.full((4,), float(n))) for n in (1, 2, 3, 4))


def round_robin_reads_another_weight() -> Result:
    """round_robin_gradients: ``safe_get_full_fp32_param`` returns the weights of another parameter."""
    return [1, 2, 3, 4], weights(build(2, module=Four(), round_robin_gradients=True))


def stage_3_applies_an_absent_parameter_again() -> Result:
    """Stage 3, one backward per step: b takes no part in the second step; its last gradient is applied again."""
    engine = build(3)
    update(engine, [(1, 5)])
    return [2, 0], update(engine, [(2, None)])


def stage_3_counts_an_older_window() -> Result:
    """Stage 3: b takes part from the second micro-batch on, and is added to what an older window has left."""
    engine = build(3)
    update(engine, [(8, 8), (8, 8)])
    return [4, 3], update(engine, [(1, None), (3, 3)])


@contextmanager
def fp16_on_the_cpu() -> Iterator[None]:
    """Let DeepSpeed accept fp16, which it refuses on the CPU although PyTorch computes it."""
    from deepspeed.accelerator import get_accelerator

    kind = type(get_accelerator())
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    with (
        patch.object(kind, "is_fp16_supported", lambda self: True),
        patch.object(kind, "supported_dtypes", lambda self: dtypes),
    ):
        yield


def a_gradient_is_divided_by_the_next_scale() -> Result:
    """fp16, stages 1 to 3: the third update, in which a dynamic loss scale is doubled, is divided by the new one."""
    scale = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2, "hysteresis": 1}
    with fp16_on_the_cpu():
        engines = [build(stage, config={"fp16": scale}) for stage in (1, 2, 3)]
        return [2, 2, 2], [[update(engine, [(2, 2)])[0] for _ in range(3)][-1] for engine in engines]


class TwoLayers(torch.nn.Module):
    """Two layers, each with a matrix and a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))

    def forward(self, factor: float) -> torch.Tensor:
        x = torch.ones(1, 4, dtype=torch.bfloat16)
        return torch.stack([layer(x).sum() * factor for layer in self.layers]).sum()


def vectors_beside_matrices_are_lost() -> Result:
    """Muon, a bf16 model with fp32 sums: the gradients of the biases, each of which comes before its matrix's."""
    from deepspeed.utils import safe_get_full_grad

    config = {
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "optimizer": {"type": "Muon", "params": {"lr": 0.02, "torch_adam": True}},
    }
    engine = build(2, module=TwoLayers(), config=config)
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine(3.0))
    biases = [safe_get_full_grad(layer.bias) for layer in engine.module.layers]
    return [3, 3], [None if bias is None else float(bias[0]) for bias in biases]


class HostReads(TorchDispatchMode):
    """Counts the operators that give a value to the host, for which it waits on a GPU."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket is torch.ops.aten._local_scalar_dense
        return func(*args, **(kwargs or {}))


class Many(torch.nn.Module):
    """64 weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.nn.Parameter(torch.zeros(4)) for _ in range(64))

    def forward(self, factor: float) -> torch.Tensor:
        return torch.stack([(weight * factor).sum() for weight in self.weights]).sum()


def the_host_reads_every_gradient() -> Result:
    """CPU offload, 64 weights of which each rank owns half, nothing to check: host reads of a backward and a step."""
    engine = build(2, offload=True, module=Many(), config={"bf16": {"enabled": True, "check_grad_overflow": False}})
    engine.set_gradient_accumulation_boundary(True)
    loss = engine(1.0)
    with HostReads() as backward_reads:
        engine.backward(loss)
    with HostReads() as step_reads:
        engine.step()
    return [0, 0], [backward_reads.count, step_reads.count]


def by_rank(value: Any) -> list[Any]:
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


class Nine(torch.nn.Module):
    """A weight of nine elements, which two ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(9))

    def forward(self) -> torch.Tensor:
        return self.weight.sum()


def stage_3_sets_no_gradient_on_the_last_rank() -> Result:
    """Stage 3: ``safe_set_full_grad`` of a parameter of nine elements raises on the second rank."""
    from deepspeed.utils import safe_set_full_grad

    engine = build(3, module=Nine())
    engine.set_gradient_accumulation_boundary(True)
    engine.backward(engine())
    try:
        safe_set_full_grad(engine.module.weight, torch.ones(9))
    except RuntimeError as error:
        return ["no error"] * 2, by_rank(type(error).__name__)
    return ["no error"] * 2, by_rank("no error")


def stage_3_loses_gradients_that_were_offloaded() -> Result:
    """Stage 3: ``offload_states`` of the gradients and ``reload_states`` before the step."""
    from deepspeed.runtime.zero.offload_config import OffloadStateTypeEnum

    engine = build(3)
    backward(engine, (1, 1), boundary=True)
    engine.offload_states(include=[OffloadStateTypeEnum.lp_grads], pin_memory=False)
    engine.reload_states()
    try:
        engine.step()
    except Exception as error:
        return "no error", f"{type(error).__name__}: {error}"
    return "no error", "no error"


def stage_3_applies_the_infinity_of_a_skipped_window() -> Result:
    """Stage 3 with offload, bf16: b is inf in a window, which is skipped, and takes no part in the next."""
    engine = build(3, offload=True, config={"bf16": {"enabled": True}})
    update(engine, [(1, float("inf"))])
    return [2, 0], update(engine, [(2, None)])


def stage_3_keeps_destroyed_engines() -> Result:
    """Stage 3: three engines that have stepped twice and are destroyed: how many of their modules are never freed."""
    modules = []
    for _ in range(3):
        engine = build(3)
        modules.append(weakref.ref(engine.module))
        update(engine, [(1, 1)])
        update(engine, [(1, 1)])
        engine.destroy()
        del engine
    gc.collect()
    return 0, sum(module() is not None for module in modules)


def a_load_rounds_the_optimizer_state() -> Result:
    """16-bit master weights: the fp32 momentum of DeepSpeed's CPU Adam is bf16 after a load: no run resumes exactly."""
    from deepspeed.ops.adam import DeepSpeedCPUAdam

    def build_adam() -> Any:
        module = Weights()
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "bf16": {"enabled": True, "bf16_master_weights_and_grads": True},
            "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        }
        return deepspeed.initialize(model=module, optimizer=DeepSpeedCPUAdam(module.parameters()), config=config)[0]

    def momentum(engine: Any) -> str:
        (state,) = engine.optimizer.optimizer.state.values()
        return str(state["exp_avg"].dtype)

    engine = build_adam()
    update(engine, [(1, 1)])
    with tempfile.TemporaryDirectory() as folder:
        folders = [folder]
        torch.distributed.broadcast_object_list(folders, 0)
        engine.save_checkpoint(folders[0])
        loaded = build_adam()
        loaded.load_checkpoint(folders[0])
        torch.distributed.barrier()
    return momentum(engine), momentum(loaded)


@dataclass
class Outputs:
    """Outputs of a model, in an object into which DeepSpeed does not look for tensors."""

    loss: torch.Tensor


class InDataclass(Weights):
    """The two weights, with the loss in a dataclass."""

    def forward(self, gradients: Micro) -> Outputs:  # type: ignore[override]
        return Outputs(super().forward(gradients))


def a_backward_from_a_dataclass_is_lost() -> Result:
    """CPU offload: ``loss.backward()`` of a loss that the model returns in a dataclass. On the device: KeyError."""
    engine = build(2, offload=True, module=InDataclass())
    before = weights(engine)
    engine((2, 2)).loss.backward()
    engine.step()
    return [2.0, 2.0], [x - y for x, y in zip(before, weights(engine), strict=True)]


def a_gpu_named_by_its_uuid_has_no_memory() -> Result:
    """``CUDA_VISIBLE_DEVICES`` has UUIDs, as schedulers write them: ``available_memory``, with a stand-in for NVML."""
    from deepspeed.accelerator import cuda_accelerator

    nvml = MagicMock()
    nvml.nvmlDeviceGetMemoryInfo.return_value.free = 2**30
    visible = patch.dict(os.environ, CUDA_VISIBLE_DEVICES="GPU-5a1c3f2e-0000-4000-8000-000000000000")
    with patch.object(cuda_accelerator, "pynvml", nvml), visible:
        try:
            return 2**30, cuda_accelerator.CUDA_Accelerator().available_memory(0)
        except Exception as error:
            return 2**30, f"{type(error).__name__}: {error}"


FAULTS: list[Callable[[], Result]] = [
    earlier_requests_are_lost,
    first_request_is_lost,
    an_older_window_is_counted,
    late_parameter_counts_an_older_window,
    absent_parameter_is_applied_again,
    parameter_of_an_earlier_micro_batch_is_not_published,
    unreduced_parameter,
    zero_grad_discards_nothing,
    pending_gradients_survive_a_load,
    step_without_backward,
    loss_of_two_forwards,
    a_backward_from_a_dataclass_is_lost,
    round_robin_reads_another_weight,
    # Before those of stage 3, after which the gradient of a matrix comes before that of its bias.
    vectors_beside_matrices_are_lost,
    the_host_reads_every_gradient,
    stage_3_applies_an_absent_parameter_again,
    stage_3_counts_an_older_window,
    a_gradient_is_divided_by_the_next_scale,
    stage_3_sets_no_gradient_on_the_last_rank,
    stage_3_loses_gradients_that_were_offloaded,
    stage_3_applies_the_infinity_of_a_skipped_window,
    stage_3_keeps_destroyed_engines,
    a_load_rounds_the_optimizer_state,
    a_gpu_named_by_its_uuid_has_no_memory,
]


def main(names: list[str]) -> None:
    deepspeed.utils.logger.setLevel("ERROR")
    # An operator for inference, which would be compiled for a minute where ranks are joined on the CPU.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if torch.cuda.is_available() else "gloo", verbose=False)
    for fault in FAULTS:
        if not names or fault.__name__ in names:
            wanted, got = fault()
            if torch.distributed.get_rank() == 0:
                print(f"{fault.__name__}: {wanted} is right, {got} with DeepSpeed {deepspeed.__version__}", flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
