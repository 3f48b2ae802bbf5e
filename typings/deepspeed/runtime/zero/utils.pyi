import torch

def get_norm_dtype() -> torch.dtype:
    """fp64 where the device has it."""

def assert_ints_same_as_other_ranks(ints: list[int]) -> None:
    """Compares by broadcasts of the module's ``dist``, at the start of forwards until their order is known."""
