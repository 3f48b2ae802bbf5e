"""DeepSpeed 0.19.6: no padding between parameters, no option that leaves the norm out, and a link that a load breaks.

Since 0.19.7 ``parameter_alignment`` may leave gaps between the parameters of the flat weights, whose offsets the
optimizer keeps; before, they lie side by side. ``compute_grad_norm`` came then as well; before, the norm is always
computed. Both options are refused by DeepSpeed's own check of its config. Loading a universal checkpoint links the
parameters to optimizer states in the place of their master weights.

Goes when DeepSpeed 0.19.6 is no longer supported. Tested with 0.19.6.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from typing_extensions import override

from requestzero.zero.upstream.before_0_19_8 import OptimizerBefore0198


class OptimizerBefore0197(OptimizerBefore0198):
    """The request-safe optimizer on the layout of DeepSpeed 0.19.6."""

    compute_grad_norm = True

    @property
    @override
    def round_robin_bit16_offsets(self) -> list[list[int]]:  # type: ignore[override]  # read only
        """Return the first element of each parameter in its group's flat weights."""
        sizes = [[meta.numel() for meta in metas] for metas in self.round_robin_bit16_meta]
        return [list(accumulate(each, initial=0))[:-1] for each in sizes]

    @override
    def _is_muon_group(self, tensor_list: list[torch.Tensor]) -> bool:
        """Return whether Muon would take the group, as the later releases find out."""
        return bool(getattr(tensor_list[0], "use_muon", False)) and "muon" in type(self.optimizer).__name__.lower()

    @override
    def load_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Also link the parameters to their master weights again.

        After a universal checkpoint ``safe_get_full_fp32_param`` would read the optimizer state that was loaded last.
        """
        super().load_state_dict(*args, **kwargs)
        for params, master in zip(self.bit16_groups, self.single_partition_of_fp32_groups, strict=True):
            for mapping in filter(None, (param._hp_mapping for param in params)):
                address = mapping.get_hp_fragment_address()
                mapping.hp_fragment = master.narrow(0, address.start, address.numel)
