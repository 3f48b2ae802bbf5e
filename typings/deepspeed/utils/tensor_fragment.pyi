import torch

class tensor_fragment:
    def get_lp_grad_fragment(self, index_in_param_group: int) -> torch.Tensor | None:
        """Looks a gradient up by its index in the group, in what stands in the dictionary of gradients."""

def get_full_hp_grad(self: torch.Tensor) -> torch.Tensor | None:
    """Behind ``safe_get_full_grad``: reads what the dictionaries of gradients hold, and all-reduces it."""

def set_full_hp_param(self: torch.Tensor, value: torch.Tensor, optim_state_key: str | None = None) -> None:
    """Behind ``safe_set_full_fp32_param``, as an attribute of every parameter."""

def set_full_hp_grad(self: torch.Tensor, value: torch.Tensor) -> None:
    """Behind ``safe_set_full_grad``: writes into what the dictionaries of gradients hold."""

def safe_get_full_fp32_param(param: torch.Tensor) -> torch.Tensor | None: ...
def safe_set_full_grad(param: torch.Tensor, value: torch.Tensor) -> None: ...
def safe_get_full_grad(param: torch.Tensor) -> torch.Tensor | None: ...
