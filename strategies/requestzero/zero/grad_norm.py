"""The norm of the window's gradient, the verdict whether it is finite, and its division: read once, in ``step()``.

Norms stay on the device; one all-reduce brings together those of all groups and ranks, and one host read takes them.
A norm is finite exactly when DeepSpeed's ``step`` would go on, so it is the overflow verdict as well: it describes the
latest value of the sum, as the host gradient holds it, and an overflow that later gradients cancel leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.constants import PIPE_REPLICATED
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.runtime.zero.utils import get_norm_dtype
from typing_extensions import override

from requestzero.zero.divisor import DIVISOR_ENTRIES, WindowDivisor

# Elements whose norm is taken at a time: bounds the widened copy to 32 MiB in fp64.
_NORM_CHUNK = 2**22


def partition_norm(gradient: torch.Tensor) -> torch.Tensor:
    """The 2-norm of a gradient as a scalar on its device, in DeepSpeed's dtype for norms (fp64 where there is one)."""
    dtype = get_norm_dtype()
    if gradient.numel() <= _NORM_CHUNK:
        return torch.linalg.vector_norm(gradient, dtype=dtype)
    pieces = gradient.view(-1).split(_NORM_CHUNK)
    return torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(piece, dtype=dtype) for piece in pieces]))


def cause_of_overflow(squares: Iterable[float]) -> str | None:
    """``"NaN"`` or ``"inf"``, whichever is among squared norms, or ``None`` where all are finite."""
    total = sum(squares)
    return None if math.isfinite(total) else "NaN" if math.isnan(total) else "inf"


def gradient_norms(gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """:func:`partition_norm` of each, with one operator for all but the large ones."""
    small = [gradient for gradient in gradients if gradient.numel() <= _NORM_CHUNK]
    norms = iter(torch._foreach_norm(small, 2, dtype=get_norm_dtype()) if small else ())
    return [next(norms) if grad.numel() <= _NORM_CHUNK else partition_norm(grad) for grad in gradients]


class WindowNorm(WindowDivisor):
    """Written for DeepSpeed 0.19.8, which reads one norm per tensor and divides with the next update's loss scale."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._group_norms: list[float] | None = None
        self._frozen_scale: float | None = None
        self.unread_norm: torch.Tensor | None = None
        """The norm of the step at hand, times loss scale and divisor, where DeepSpeed would read it for nothing."""
        self.overflow_cause: str | None = None
        """Whether what was last read is ``"inf"`` or ``"NaN"``; ``None``: finite, or not read."""
        super().__init__(*args, **kwargs)

    # --- scale: loss scale and divisor ------------------------------------------------------------------------------

    def freeze_scale(self, divisor: float) -> None:
        """For the step at hand, take the divisor into the loss scale, which norm, clipping and Muon follow.

        Frozen, because ``step`` adjusts a dynamic loss scale before it unscales the gradients, which were computed with
        the scale before the adjustment.
        """
        self._frozen_scale = float(super()._get_loss_scale()) * divisor
        self.unread_norm = None

    def thaw_scale(self) -> None:
        """Back to the loss scale of the next backward."""
        self._frozen_scale = None

    @override
    def _get_loss_scale(self) -> Any:
        return super()._get_loss_scale() if self._frozen_scale is None else self._frozen_scale

    # Properties bind the function they were made with.
    loss_scale = property(lambda self: self._get_loss_scale(), DeepSpeedZeroOptimizer._set_loss_scale)
    cur_scale = loss_scale

    @override
    def unscale_and_clip_grads(self, grad_groups_flat: list[torch.Tensor], total_norm: Any) -> None:
        """Divide by loss scale, divisor and clipping factor in one pass, or in none where their product is 1.

        ``total_norm`` is the norm of the gradient before the division. A true division: multiplying by the reciprocal
        equals it for powers of two only.
        """
        factor = float(self.loss_scale)
        if self.clip_grad > 0.0:
            norm = float(total_norm) / factor
            # As in DeepSpeed, a norm that is not finite (where the check is off) clips everything to nothing.
            factor *= max(1.0, (norm + 1e-6) / self.clip_grad) if math.isfinite(norm) else math.inf
        if factor != 1.0:
            for grad in grad_groups_flat:
                grad.data.div_(factor)

    # --- norm and verdict -------------------------------------------------------------------------------------------

    @override
    def has_overflow(self, partition_gradients: bool = True) -> bool:
        """Whether any rank's gradient is not finite (collective, one host read, unless the weights came with it)."""
        if not self.compute_grad_norm:
            self.overflow_cause = None
            return bool(super().has_overflow(partition_gradients))
        if self._group_norms is None:
            self._group_norms = self._read_group_norms()
        return not all(map(math.isfinite, self._group_norms))

    @override
    def scaled_global_norm(self, norm_type: int = 2) -> float | torch.Tensor:
        """The norm over all groups and ranks, times loss scale and divisor; not finite where a gradient is not.

        A number, or a scalar on the device where nothing has to know it now. Collective where :meth:`has_overflow` has
        not just read it.
        """
        assert norm_type == 2, "only the 2-norm is supported"
        if not self._needs_norm_on_host():
            norm = self._unneeded_norm()
            if self.dtype == torch.bfloat16 or self._frozen_scale is None:
                return norm
            self.unread_norm = norm
            return 0.0  # DeepSpeed's step would read the norm of an fp32 model, to skip what nobody wants to be checked
        norms = self._read_group_norms() if self._group_norms is None else self._group_norms
        self.forget_norms()
        return math.hypot(*norms)

    def _unneeded_norm(self) -> torch.Tensor:
        """As a scalar that is not read now; one on the CPU where the weights' reading has brought it."""
        if self._group_norms is None:
            return self._reduce_sums()[: len(self.group_indices)].sum().sqrt().float()
        norm = math.hypot(*self._group_norms)
        self.forget_norms()
        return torch.tensor(norm)

    def _needs_norm_on_host(self) -> bool:
        """Whether ``step`` decides anything by the norm: unchecked gradients are applied unseen."""
        return (
            self.check_grad_overflow or self.clip_grad > 0.0 or (self.cpu_offload and not self.ignore_unused_parameters)
        )

    def forget_norms(self) -> None:
        """What has been read describes gradients that have changed since, or are gone."""
        self._group_norms = None

    @override
    def _apply_muon_updates_cpu_offload(self) -> None:
        """Also forget norms that were read before the gradients of Muon groups became updates."""
        super()._apply_muon_updates_cpu_offload()
        if any(self.is_muon_group(i) for i in self.group_indices):
            self.forget_norms()

    def _read_group_norms(self) -> list[float]:
        """Norm of every group over all ranks (collective, the step's one host read).

        Raises:
            AssertionError: on all ranks, if an unused parameter is not allowed and there is one.
            RuntimeError: on all ranks, if their divisors or weights make no divisor.
        """
        groups = len(self.group_indices)
        reduced = self._reduce_sums()
        self.agreement.wait_for_device(reduced.device)
        sums = reduced.tolist()
        unused = sums[groups]
        if unused:
            raise AssertionError(
                f"{int(unused)} parameter shards received no gradient in this update window (on this rank: "
                f"{', '.join(self._unused_parameters()) or 'none'}), and zero_optimization.ignore_unused_parameters is "
                "false: set it to true, or let every parameter take part."
            )
        self.take_divisor(sums[groups + 1 :])
        self.overflow_cause = cause_of_overflow(sums[:groups])
        return [math.sqrt(square) for square in sums[:groups]]

    def read_squares(self) -> list[float]:
        """Squared norm of every group's sum as it is now, over all ranks (collective, one host read)."""
        sums = self._reduce_sums()
        self.agreement.wait_for_device(sums.device)
        return list(sums[: len(self.group_indices)].tolist())

    def _reduce_sums(self) -> torch.Tensor:
        """Summed over ranks, on the device: every group's squared norm, then what all ranks have to agree on.

        That is the number of unused parameter shards where these are not allowed, and what makes the divisor.
        """
        groups = len(self.group_indices)
        size = groups + 1 + DIVISOR_ENTRIES
        sums = torch.zeros(size, dtype=get_norm_dtype(), device=get_accelerator().current_device_name())
        for group_idx in self.group_indices:
            sums[group_idx] = self._local_square(group_idx)
        if self.cpu_offload and not self.ignore_unused_parameters:
            sums[groups] = len(self._unused_parameters())
        self.put_divisor(sums, groups + 1)
        self.comm.all_reduce(sums, op=dist.ReduceOp.SUM, group=self.dp_process_group)
        self._model_parallel_all_reduce(tensor=sums, op=dist.ReduceOp.SUM)
        if self.has_moe_layers:
            norms = list(sums[:groups].sqrt().to(self.device))
            self._average_expert_grad_norms(norms)
            sums[:groups] = torch.stack(norms).square()
        return sums

    def weigh_window(self) -> bool:
        """Make the window's total weight its divisor; whether there is any (collective, one host read).

        The sums that the step needs anyway are read along, unless their norms are not final yet (Muon) or not wanted
        (``compute_grad_norm: false``).

        Raises:
            AssertionError, RuntimeError: on all ranks, see :meth:`_read_group_norms`.
        """
        self.window.by_weight = True
        self.forget_norms()
        if self.compute_grad_norm and not any(map(self.is_muon_group, self.group_indices)):
            self._group_norms = self._read_group_norms()
        else:
            self.reduce_divisor()
        assert self.window.total_weight is not None
        return self.window.total_weight > 0

    def _unused_parameters(self) -> list[str]:
        """Names of owned parameters without a gradient in this window. Counted over all ranks, so that all fail."""
        owned = (self.param_dict[param_id] for param_id in self.grad_position.keys() - self.window.used)
        return sorted(self.param_names[param] for param in owned)

    def _local_square(self, group_idx: int) -> torch.Tensor:
        """Squared norm of what this rank owns and counts of the group, a scalar on the device."""
        recorded = self._offloaded_norms if self.cpu_offload else self._device_norms
        norms = list(recorded(group_idx)) if self.window.has_sum else []
        device = get_accelerator().current_device_name()
        if not norms:
            return torch.zeros((), dtype=get_norm_dtype(), device=device)
        square = torch.stack(norms).square().sum()
        if not self.cpu_offload and self._muon_update_lacks_loss_scale(group_idx):
            square = square * self.loss_scale**2
        return square.to(device)

    def _offloaded_norms(self, group_idx: int) -> Iterable[torch.Tensor]:
        """Norms recorded in backward, one for a published partition, else one per parameter."""
        if group_idx in self.window.partition_norms:
            yield self.window.partition_norms[group_idx]
            return
        for param in self.params_in_partition[group_idx]:
            norm = self.norm_for_param_grads.get(self.get_param_id(param))
            if norm is not None and self._counts(param):
                yield norm

    def _device_norms(self, group_idx: int) -> Iterable[torch.Tensor]:
        """Norms of the sums, one for a flat partition, else one per parameter."""
        partition = self.resident_partition(group_idx)
        if partition is not None and self._counts_whole(group_idx):
            yield partition_norm(partition)
            return
        owned = self._owned_on_device(group_idx)
        yield from gradient_norms([gradient for param, gradient in owned if self._counts(param)])

    def _owned_on_device(self, group_idx: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        gradients = [g for g in self.averaged_gradients[group_idx] if not getattr(g, "_zero_padding", False)]
        return zip(self.params_in_partition[group_idx], gradients, strict=False)

    def owned_sums(self, group_idx: int) -> Iterable[tuple[torch.Tensor, torch.Tensor]]:
        """Every owned parameter of the group with what this rank owns of its sum, as the step reads it."""
        if not self.cpu_offload:
            return self._owned_on_device(group_idx)
        return ((param, self.owned_slice(param)) for param in self.params_in_partition[group_idx])

    def _counts(self, param: torch.Tensor) -> bool:
        """DeepSpeed's rule against counting twice what pipeline or model parallelism replicates."""
        if getattr(param, PIPE_REPLICATED, False):
            return False
        return is_model_parallel_parameter(param) or self.model_parallel_rank == 0

    def _counts_whole(self, group_idx: int) -> bool:
        return all(map(self._counts, self.params_in_partition[group_idx]))
