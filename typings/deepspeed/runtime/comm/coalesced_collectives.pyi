from typing import Any

def _torch_reduce_scatter_fn(
    input_tensor: Any, output_tensor: Any, group: Any = None, async_op: bool = False, prof: bool = False
) -> Any:
    """Reduces by ``reduce_scatter_fn`` of the module's ``dist``, and waits."""
