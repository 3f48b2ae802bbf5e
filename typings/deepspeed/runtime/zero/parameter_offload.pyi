from torch import nn

FWD_MODULE_STACK: list[nn.Module]
"""The modules of all engines that were built, and above them those whose forward runs."""
