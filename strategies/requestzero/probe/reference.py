"""References to compare with: the figures of DeepSpeed's public pull requests, else predictions by arithmetic."""

from __future__ import annotations

from requestzero.probe.grid import Configuration
from requestzero.probe.models import Shape
from requestzero.probe.result import Row

# Pull request 9044 of DeepSpeed: largest relative error of a window of 16 micro-batches under CPU offload, on a bf16
# model, by stage, masters and accumulation dtype.
_PRECISION = {
    (2, "fp32", "fp32"): 0.0,
    (2, "fp32", "bf16"): 6.2e-3,
    (2, "bf16", "fp32"): 2.4e-3,
    (1, "fp32", "fp32"): 2.4e-3,
    (1, "fp32", "bf16"): 6.2e-3,
}

# The same: ZeRO-2, CPU offload, bf16 model, fp32 masters and accumulation, one GPU. In MB of 2^20 bytes, since the two
# differ by an fp32 partition of exactly that many.
_MEMORY_SHAPE = Shape(parameters=8 * 4096 * 4096, tensors=8)
_MEMORY_CONFIGURATION = Configuration(2, True, "bf16", "fp32")
_HELD, _RELEASED, _PEAK = 816 * 2**20, 304 * 2**20, 2090 * 2**20

# The same: one boundary backward of Qwen3-4B on one GPU.
_READS_TENSORS, _READS = 398, 399

_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


def add_references(row: Row, shape: Shape, ranks: int, device: str) -> None:
    """Add the known references to measured values: ``NAME_reference``, and as ``NAME_to_reference`` their ratio."""
    known = {
        "precision": _precision(row.configuration),
        "bytes_between_requests": bytes_between_requests(row, shape, ranks, device),
        "bytes_at_peak": float(_PEAK) if _is_public(row.configuration, shape, ranks, device) else None,
        "host_reads_backward": _host_reads(row, shape, ranks),
    }
    for name, reference in known.items():
        if reference is not None and name in row.values:
            row.values[f"{name}_reference"] = reference
            row.values[f"{name}_to_reference"] = ratio(row.values[name], reference)


def ratio(measured: float, reference: float) -> float | None:
    """Return ``measured / reference``; 1 where both are zero, ``None`` where only the reference is."""
    if measured == reference:
        return 1.0
    return measured / reference if reference else None


def _precision(configuration: Configuration) -> float | None:
    if configuration.model != "bf16" or not configuration.offload:
        return None
    return _PRECISION.get((configuration.stage, configuration.masters, configuration.accumulation))


def _is_public(configuration: Configuration, shape: Shape, ranks: int, device: str) -> bool:
    return (configuration, shape, ranks, device) == (_MEMORY_CONFIGURATION, _MEMORY_SHAPE, 1, "cuda")


def bytes_between_requests(row: Row, shape: Shape, ranks: int, device: str) -> float | None:
    """Predict one partition per rank in the accumulation dtype, or nothing where the host gradient replaces it.

    At stage 3 the reduction bucket too, which DeepSpeed keeps there: the probe's has the model's size. On CUDA, where
    everything is counted, also the weights. ``None`` with ``"auto"``: it depends on the memory that is free.
    """
    configuration, engine = row.configuration, row.engine
    if engine.retain == "auto":
        return None
    released = configuration.has_host_copy and engine.requestzero and engine.retain is False
    if _is_public(configuration, shape, ranks, device):
        return float(_RELEASED if released else _HELD)
    model, is_stage_3 = _BYTES[configuration.model] * shape.parameters, configuration.stage == 3
    weights = 0.0 if device != "cuda" else model / ranks if is_stage_3 else model
    on_host = released or _is_summed_on_host(configuration)
    return weights + (model if is_stage_3 else 0) + (0 if on_host else _partition(configuration, shape, ranks))


def _is_summed_on_host(configuration: Configuration) -> bool:
    """Return true if the sum has no buffer on the device: under CPU offload, in the model's own dtype or at stage 3."""
    return configuration.offload and (configuration.accumulation == configuration.model or configuration.stage == 3)


def _partition(configuration: Configuration, shape: Shape, ranks: int) -> float:
    return _BYTES[configuration.accumulation] * shape.parameters / ranks


def _host_reads(row: Row, shape: Shape, ranks: int) -> float | None:
    """Predict host reads: stock's one norm of every owned tensor under CPU offload, at stages 1 and 2; else none."""
    if not row.configuration.offload:
        return None
    if row.engine.requestzero or row.configuration.stage == 3:
        return 0.0
    return float(_READS) if (shape.tensors, ranks) == (_READS_TENSORS, 1) else shape.tensors / ranks
