import torch
from torch.distributed import ProcessGroup

def _dist_allgather_fn(
    input_tensor: torch.Tensor, output_tensor: torch.Tensor, group: ProcessGroup | None = None
) -> object:
    """Begins a gather of weights; of the work that it returns only ``wait()`` is called."""
