import torch

def get_norm_dtype() -> torch.dtype:
    """fp64 where the device has it."""
