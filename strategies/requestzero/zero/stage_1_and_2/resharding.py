"""Optimizer states that another number of ranks has saved: every rank takes its own slices, by parameter name."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    CLIP_GRAD,
    DS_VERSION,
    GROUP_PADDINGS,
    LOSS_SCALER,
    OPTIMIZER_STATE_DICT,
    PARAM_SLICE_MAPPINGS,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)

from requestzero.zero.checkpoint.files import read_states
from requestzero.zero.stage_1_and_2.layout import PartitionLayout, Place

_OF_ALL_RANKS = (LOSS_SCALER, "dynamic_loss_scale", "overflow", CLIP_GRAD, DS_VERSION)
"""What every rank has saved alike."""

States = dict[str, Any]


class Resharded(Protocol):
    """An optimizer of ZeRO stage 1 or 2."""

    layout: PartitionLayout
    param_names: dict[torch.Tensor, str]

    def state_dict(self) -> States:
        """Return what this rank saves."""


def own_states(optimizer: Resharded, files: Sequence[Path]) -> States:
    """Return what this rank would have saved as one of today's ranks, from what others have saved (this rank only).

    Values move unchanged. What is not cut into partitions, such as the number of steps, is the same on all ranks.

    Args:
        optimizer: has this rank's layout.
        files: DeepSpeed's files of optimizer state, one a data-parallel rank, in rank order.

    Returns:
        The states for DeepSpeed's ``load_state_dict``, on the CPU.

    Raises:
        OSError: a file cannot be read.
        ValueError: the parameters or their groups are others, or a state is cut in another way.
    """
    groups: list[_Group] = []
    first: States = {}
    for file in files:
        states = read_states(file)[OPTIMIZER_STATE_DICT]
        first = first or states
        groups = groups or _begin(optimizer, states)
        for index, group in enumerate(groups):
            group.copy_from(states, index)
    for group in groups:
        group.check_complete()
    saved_groups = first[BASE_OPTIMIZER_STATE]["param_groups"]
    return {
        **optimizer.state_dict(),
        **{key: first[key] for key in _OF_ALL_RANKS if key in first},
        SINGLE_PARTITION_OF_FP32_GROUPS: [group.masters for group in groups],
        BASE_OPTIMIZER_STATE: {
            "state": {saved["params"][0]: group.states for saved, group in zip(saved_groups, groups, strict=True)},
            "param_groups": saved_groups,
        },
    }


def _begin(optimizer: Resharded, states: States) -> list[_Group]:
    layout = optimizer.layout
    found = len(states[SINGLE_PARTITION_OF_FP32_GROUPS])
    if found != len(layout.groups):
        raise ValueError(
            f"The checkpoint has {found} parameter groups and this optimizer {len(layout.groups)}: build it with the "
            "groups of the saved run."
        )
    return [
        _Group(
            {optimizer.param_names[layout.params[param_id]]: place for param_id, place in group.owned.items()},
            group.partition_size,
        )
        for group in layout.groups
    ]


class _Group:
    """This rank's partition of one parameter group, which fills up with what other ranks have saved.

    Args:
        owned: the partition's parts of parameters, by name.
        size: elements of the partition.
    """

    def __init__(self, owned: Mapping[str, Place], size: int) -> None:
        self._owned, self._size = owned, size
        self._passed: Counter[str] = Counter()
        self._copied: Counter[str] = Counter()
        self.masters = torch.zeros(0)
        self.states: States = {}

    def copy_from(self, saved: States, index: int) -> None:
        """Copy what a rank has saved of this partition. To be called in rank order: parts carry no position."""
        masters = saved[SINGLE_PARTITION_OF_FP32_GROUPS][index]
        size = masters.numel() + int(saved[GROUP_PADDINGS][index])
        stretches = list(self._stretches(saved[PARAM_SLICE_MAPPINGS][index]))
        self.masters = self._filled(self.masters, masters, stretches)
        base = saved[BASE_OPTIMIZER_STATE]
        for key, value in base["state"].get(base["param_groups"][index]["params"][0], {}).items():
            if not torch.is_tensor(value) or value.dim() == 0:
                self.states.setdefault(key, value)
            elif value.shape == (size,):
                self.states[key] = self._filled(self.states.get(key), value, stretches)
            else:
                raise ValueError(
                    f"The optimizer's state {key!r} has the shape {tuple(value.shape)}, where the partition has {size} "
                    "elements: it cannot be cut for another number of ranks."
                )

    def _stretches(self, mapping: Mapping[str, Any]) -> Iterator[tuple[slice, slice]]:
        """Yield what this partition shares with a saved one: there, and here."""
        for name, fragment in mapping.items():
            start = self._passed[name]
            self._passed[name] += fragment.numel
            if (own := self._owned.get(name)) is None:
                continue
            begin, end = max(start, own.start), min(start + fragment.numel, own.start + own.numel)
            if begin < end:
                self._copied[name] += end - begin
                there, here = fragment.start + begin - start, own.offset + begin - own.start
                yield slice(there, there + end - begin), slice(here, here + end - begin)

    def _filled(
        self, target: torch.Tensor | None, source: torch.Tensor, stretches: Sequence[tuple[slice, slice]]
    ) -> torch.Tensor:
        if target is None or target.numel() == 0:
            target = source.new_zeros(self._size)
        for there, here in stretches:
            target[here] = source[there]
        return target

    def check_complete(self) -> None:
        """Raise ValueError where the saved ranks together have not all of this partition."""
        missing = [name for name, place in self._owned.items() if self._copied[name] != place.numel]
        if missing:
            raise ValueError(
                f"The checkpoint's parameter groups do not have {', '.join(missing)}, or not in this shape: load it "
                "into the model and the parameter groups of the saved run."
            )
