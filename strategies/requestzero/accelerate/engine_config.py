"""The DeepSpeed config as the engine gets it, resolved with the world size and the loaders."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.utils.data import DataLoader

from requestzero.config.nested import Config
from requestzero.config.translation import AUTO
from requestzero.config.validation import Count, check

MICRO, GLOBAL = "train_micro_batch_size_per_gpu", "train_batch_size"
_TOP_LEVEL = (MICRO, GLOBAL, "gradient_accumulation_steps", "gradient_clipping")


@dataclass(frozen=True)
class BatchSizes:
    """Sequences per rank and micro-batch, micro-batches per update, ranks. Only DeepSpeed's logs use them."""

    micro: int
    steps: int
    ranks: int

    @property
    def total(self) -> int:
        """Sequences per update, over all ranks."""
        return self.micro * self.steps * self.ranks


def choose_sizes(config: Config, loaders: Iterable[Any], take_smallest: bool, steps: int, ranks: int) -> BatchSizes:
    """Return the sizes in the config, else the loaders', else 1 (a loader of uneven micro-batches has none).

    Raises:
        ValueError: a size that is not a whole number above 0, or sizes that do not fit together.
    """
    given, total = (config.get(key, AUTO) for key in (MICRO, GLOBAL))
    for key, value in ((MICRO, given), (GLOBAL, total)):
        if value is not None:
            check(key, value, Count(also=AUTO))
    found = [loader.batch_size for loader in loaders if loader.batch_size is not None]
    if given in (None, AUTO) and found:
        given = min(found) if take_smallest else max(found)
    if given in (None, AUTO):
        given = 1 if total in (None, AUTO) else max(1, total // (steps * ranks))
    sizes = BatchSizes(given, steps, ranks)
    if total not in (None, AUTO, sizes.total):
        raise ValueError(
            f"{GLOBAL}={total} is not what {sizes.micro} sequences per micro-batch, {steps} micro-batches per update "
            f"(gradient_accumulation_steps) and {ranks} ranks make, which is {sizes.total}: leave it out, or set it to "
            "'auto'."
        )
    return sizes


def data_loaders(objects: Iterable[Any]) -> list[DataLoader]:
    """Return the torch loaders among the objects to prepare."""
    return [item for item in objects if isinstance(item, DataLoader)]


@contextmanager
def engine_config(config: Config, sizes: BatchSizes, clipping: float | None) -> Iterator[None]:
    """Give ``config`` the engine's values while the block runs, and then the user's, with ``"auto"`` resolved.

    The engine gets one micro-batch per update, since the step divides, and no batch size that would have to agree with
    that. In place, since Accelerate takes the config from the plugin.
    """
    saved = {key: config[key] for key in _TOP_LEVEL if key in config}
    config.pop(GLOBAL, None)
    config.update({MICRO: sizes.micro, "gradient_accumulation_steps": 1, "gradient_clipping": clipping or 0.0})
    try:
        yield
    except BaseException:
        for key in _TOP_LEVEL:
            config.pop(key, None)
        config.update(saved)
        raise
    else:
        config.update({MICRO: sizes.micro, GLOBAL: sizes.total, "gradient_accumulation_steps": sizes.steps})
