from typing import Any

import torch

def link_hp_params(
    lp_param_list: list[torch.Tensor],
    flat_hp_partition: torch.Tensor,
    gradient_dict: dict[int, Any],
    offload_gradient_dict: dict[int, Any],
    use_offload: bool,
    param_group_index: int,
    partition_start: int,
    partition_size: int,
    dp_group: Any,
    param_offsets: list[int] | None = None,
) -> None:
    """Gives every parameter the dictionaries in which ``safe_get_full_grad`` finds its gradient."""
