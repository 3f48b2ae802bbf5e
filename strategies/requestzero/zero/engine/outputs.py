"""A model's outputs, as far as DeepSpeed looks for tensors in them."""

from __future__ import annotations

import torch


def are_searched(outputs: object) -> bool:
    """Return whether DeepSpeed looks into all of ``outputs``: it does into tuples, lists and dicts, at any depth.

    It notices that a backward begins at the tensors that it finds. Those in other objects, such as a dataclass, it does
    not see.
    """
    if isinstance(outputs, dict):
        return all(map(are_searched, outputs.values()))
    if isinstance(outputs, (tuple, list)):
        return all(map(are_searched, outputs))
    return outputs is None or isinstance(outputs, (torch.Tensor, bool, int, float, str))
