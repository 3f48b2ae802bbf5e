from collections import OrderedDict
from typing import Any

from torch import nn

FWD_MODULE_STACK: list[nn.Module]
"""The modules of all engines that were built, and above them those whose forward runs."""

class ZeROOrderedDict(OrderedDict[str, nn.Parameter]):
    """The parameters of a module."""

    def __getitem__(self, key: str) -> Any:
        """Gathers a parameter that is looked up in its module's forward, as ``_in_forward`` says."""
