"""Common ground of the optimizer's parts: a DeepSpeed ZeRO-1/2 optimizer that owns an update window."""

from __future__ import annotations

from typing import Any

import torch
from deepspeed import comm as dist
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from typing_extensions import override

from requestzero.rank_check.agreement import Agreement
from requestzero.zero.window import UpdateWindow


class WindowedOptimizer(DeepSpeedZeroOptimizer):
    """DeepSpeed's ZeRO-1/2 optimizer plus the window; behaviour comes with the classes derived from it."""

    # DeepSpeed's, which is not annotated; those that are assigned to here.
    bit16_groups: list[list[Any]]
    params_already_reduced: list[bool]
    _global_grad_norm: Any

    def __init__(self, *args: Any, records_origin: bool = False, **kwargs: Any) -> None:
        # Before super(), whose constructor calls methods that are overridden here.
        self.window = UpdateWindow()
        self.agreement = Agreement()
        self.comm: Any = dist
        """``deepspeed.comm``, or what stands for it in this optimizer's own collectives."""
        self.arriving: torch.Tensor | None = None
        """The parameter whose gradient comes into a bucket next."""
        self.records_origin = records_origin
        self.peak_grad_partition_bytes = 0
        super().__init__(*args, **kwargs)

    @property
    def group_indices(self) -> range:
        """Indices of the parameter groups."""
        return range(len(self.bit16_groups))

    def is_muon_group(self, group_idx: int) -> bool:
        """Whether the group's gradients become Muon updates before they are applied."""
        params = self.params_in_partition[group_idx]
        return bool(params) and self._is_muon_group(params)

    def resident_partition(self, group_idx: int) -> torch.Tensor | None:
        """The group's flat running sum on the device, of ``partition_size`` elements, if one is held there now."""
        return getattr(self.averaged_gradients.get(group_idx), "flat_partition", None)

    def grad_partition_bytes(self) -> int:
        """Bytes of the gradient partition that this rank holds on the accelerator now.

        Nominal: elements owned times element size. On the device a parameter that is split between ranks is held whole.
        """
        return sum(
            int(self.partition_size[i]) * self._sum_element_size(i)
            for i in self.group_indices
            if self.averaged_gradients.get(i) is not None or self.all_grad_tensors.get(i) is not None
        )

    def _sum_element_size(self, group_idx: int) -> int:
        partition = self.resident_partition(group_idx)
        if partition is not None:
            return int(partition.element_size())
        sums = self.averaged_gradients.get(group_idx) or self.all_grad_tensors.get(group_idx)
        return int(sums[0].element_size()) if sums else 0

    def note_peak_bytes(self) -> None:
        """Remember the largest gradient partition seen; called where it is largest, before a release."""
        self.peak_grad_partition_bytes = max(self.peak_grad_partition_bytes, self.grad_partition_bytes())

    # --- what DeepSpeed does for every gradient of every backward ----------------------------------------------------

    @override
    def should_refresh_expected_hook_count(self) -> bool:
        """No: autograd tells when a backward has ended, and DeepSpeed uses its count only where autograd does not.

        The count walks over all parameters of the model, a fifth of the backward of a model with many small ones.
        Outside a graph task of autograd, where nothing would tell, DeepSpeed is left to count, which raises there.
        """
        return super().should_refresh_expected_hook_count() and torch._C._current_graph_task_id() == -1

    @override
    def setup_buckets(self) -> None:
        """With :meth:`begin_backward` at the first gradient; DeepSpeed calls this for every one."""
        if not self.ready_for_gradients:
            self.begin_backward()

    def begin_backward(self) -> None:
        """Make the buckets ready for a backward's first gradient."""
        super().setup_buckets()

    @override
    def reduce_independent_p_g_buckets_and_remove_grads(self, param: torch.Tensor, i: int) -> None:
        """Also look at the gradient, before a bucket that has no room for it is emptied."""
        self.arriving = param
        if self.records_origin:
            self.record_origin(param)
        super().reduce_independent_p_g_buckets_and_remove_grads(param, i)

    def record_origin(self, param: torch.Tensor) -> None:
        """Called with every parameter whose gradient goes into a reduction, if ``records_origin`` is set."""
