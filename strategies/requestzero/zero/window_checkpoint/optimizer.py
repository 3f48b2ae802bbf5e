"""What saving and loading need of an optimizer of any ZeRO stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Protocol

import torch

from requestzero.zero.common.ranks import Ranks
from requestzero.zero.common.rollback import RequestRollback
from requestzero.zero.common.window import UpdateWindow
from requestzero.zero.overflow.origin import OverflowOrigin
from requestzero.zero.window_checkpoint.record import SavedRank
from requestzero.zero.window_checkpoint.sums import OwnedPart, SavedSums


class CheckpointedSums(Protocol):
    """The sums of a window."""

    @property
    def edited(self) -> bool: ...

    def owned_parts(self) -> Iterator[OwnedPart]: ...

    def norms(self) -> dict[str, float]: ...

    def unused_parameters(self) -> list[str]: ...

    def load(self, sums: SavedSums, rank: SavedRank, unused: Collection[str]) -> None: ...


class CheckpointedOptimizer(Protocol):
    """An optimizer with an update window."""

    window: UpdateWindow
    ranks: Ranks
    gradient_accumulation_dtype: torch.dtype
    origin: OverflowOrigin | None
    rollback: RequestRollback

    @property
    def sums(self) -> CheckpointedSums: ...

    @property
    def loss_scale(self) -> Any: ...
