"""Exact optimizer steps for windows of requests with DeepSpeed ZeRO 1, 2 and 3.

Importing this package loads neither torch nor DeepSpeed and changes nothing global; every public name is
loaded on first use.

Packages, each of which imports only from those before it:

- ``config``: options, their owner, and everything that reads, merges and checks a configuration.
- ``data``, ``planning``: micro-batches, loaders, collation; how texts are dealt out to micro-batches and ranks.
- ``environment``: installed versions and the machine.
- ``rank_check``: agreement of the data-parallel ranks on what comes next.
- ``zero``: the ZeRO optimizer and its engine.
- ``lightning``, ``accelerate``, ``fabric``, ``transformers``: the front ends.
- ``doctor``, ``probe``, ``checkpoint``, ``run``, ``faults``: command-line tools.
- ``recipes``, ``configs``: runnable training jobs and their YAML.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from requestzero._version import __version__

if TYPE_CHECKING:
    from requestzero.accelerate.plugin import RequestZeROPlugin
    from requestzero.config.options import OverflowSettings
    from requestzero.data.micro_batch import MicroBatch
    from requestzero.data.planned_loader import PlannedLoader
    from requestzero.data.request_loader import RequestLoader
    from requestzero.errors import (
        AbortRequest,
        DuplicateRequestError,
        GradientOverflowError,
        RankDisagreement,
        RankDisagreementError,
    )
    from requestzero.fabric.strategy import RequestZeROFabric
    from requestzero.lightning.strategy import RequestZeRO
    from requestzero.zero.initialization import initialize

# Public name -> the module that defines it.
_LAZY = {
    "initialize": "requestzero.zero.initialization",
    "AbortRequest": "requestzero.errors",
    "DuplicateRequestError": "requestzero.errors",
    "GradientOverflowError": "requestzero.errors",
    "MicroBatch": "requestzero.data.micro_batch",
    "OverflowSettings": "requestzero.config.options",
    "PlannedLoader": "requestzero.data.planned_loader",
    "RankDisagreement": "requestzero.errors",
    "RankDisagreementError": "requestzero.errors",
    "RequestLoader": "requestzero.data.request_loader",
    "RequestZeRO": "requestzero.lightning",
    "RequestZeROFabric": "requestzero.fabric",
    "RequestZeROPlugin": "requestzero.accelerate",
}

__all__ = [
    "AbortRequest",
    "DuplicateRequestError",
    "GradientOverflowError",
    "MicroBatch",
    "OverflowSettings",
    "PlannedLoader",
    "RankDisagreement",
    "RankDisagreementError",
    "RequestLoader",
    "RequestZeRO",
    "RequestZeROFabric",
    "RequestZeROPlugin",
    "__version__",
    "initialize",
]

# Modules that have moved are found under their former names for one release: former_names/<name>.py.
__path__ = [*__path__, str(Path(__file__).with_name("former_names"))]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_LAZY[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
