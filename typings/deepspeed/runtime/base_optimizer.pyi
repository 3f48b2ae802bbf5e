import torch

class DeepSpeedOptimizer: ...

class BackwardHookStateManager:
    """Decides when a backward has ended, by autograd's callback or else by counting gradient hooks."""

class ZeROOptimizer(DeepSpeedOptimizer):
    _backward_active_depth: int

    def is_gradient_accumulation_boundary(self) -> bool: ...
    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None: ...
    def clear_backward_seen_flag(self) -> None:
        """Forgets the hooks of an earlier backward."""
    def should_refresh_expected_hook_count(self) -> bool: ...
    def get_param_comm_dtype(self, param: torch.Tensor) -> torch.dtype:
        """The key of the bucket that a gradient goes into."""
