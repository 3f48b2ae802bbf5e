"""The differences between the strategy for the Trainer and the one for Fabric, as messages name them."""

from __future__ import annotations

from dataclasses import dataclass

from requestzero.config.option_record import FrontEnd, names_in
from requestzero.config.options import RequestZeROSettings


@dataclass(frozen=True)
class StrategyFacts:
    """One of the two strategies."""

    name: str
    """Its class."""
    owner: str
    """What it is given to, with the device and the precision."""
    own_options: tuple[str, ...]
    """Its arguments beside those of Lightning's ``DeepSpeedStrategy``."""
    accumulates: str
    """How to make an update of several requests."""
    counts_batches: bool
    """True where the ranks run equally many batches whatever the options say."""
    single_files: str
    """Which of its checkpoints are no folders."""


def _own(front_end: FrontEnd) -> tuple[str, ...]:
    return (*names_in(RequestZeROSettings, front_end), "config")


TRAINER = StrategyFacts(
    name="RequestZeRO",
    owner="Trainer",
    own_options=_own(FrontEnd.LIGHTNING),
    accumulates="use Trainer(accumulate_grad_batches=...) for requests per update",
    counts_batches=True,
    single_files="; one with weights only (save_weights_only=True, stages 1 and 2) is a file, which the plugin writes",
)
FABRIC = StrategyFacts(
    name="RequestZeROFabric",
    owner="Fabric",
    own_options=_own(FrontEnd.FABRIC),
    accumulates="call optimizer.step() after as many backwards as an update has",
    counts_batches=False,
    single_files="",
)
