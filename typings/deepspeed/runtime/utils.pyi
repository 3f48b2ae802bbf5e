from typing import Any

def is_model_parallel_parameter(p: Any) -> bool: ...
def is_invalid_grad_norm(norm: Any) -> bool:
    """Decides in the optimizer's step, by the norm that it is given, that an update is skipped."""
