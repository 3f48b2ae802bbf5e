"""Weights that a user has written since the last step: the master weights take them over."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Protocol

import torch
from deepspeed import comm as dist
from deepspeed.utils.tensor_fragment import set_full_hp_param

from requestzero.zero.common.written_elements import adopt_elements
from requestzero.zero.stage_1_and_2 import model_weights
from requestzero.zero.stage_1_and_2.layout import GroupLayout, Parameter, PartitionLayout, Place


class FlatWeights(Protocol):
    """DeepSpeed's flat memory, by parameter group."""

    bit16_groups_flat: list[torch.Tensor]
    round_robin_bit16_groups: list[list[Any]]
    round_robin_bit16_meta: list[list[torch.Tensor]]
    round_robin_bit16_offsets: list[list[int]]
    single_partition_of_fp32_groups: list[torch.Tensor]

    def _update_model_bit16_weights(self, group_index: int) -> None: ...


class WrittenWeights:
    """Brings what was written into the model's weights into the master weights, before a step would undo it.

    The step leaves weights that are the masters, rounded. An element that is something else by the next step was
    written since, and its new value becomes the master's; the others keep the bits that the weights have no room for.
    Where to look: autograd counts the writes of every tensor (its version), and a parameter whose ``data`` was replaced
    lies elsewhere. Writes through ``param.data`` are not counted, so that only a comparison finds them.

    Every rank looks after its own partition, so nothing here is collective; the step brings it to the others.

    Args:
        optimizer: has laid out the flat memory.
        layout: of its parameters.
        compares: compare the whole partition, and not only what was counted.
    """

    def __init__(self, optimizer: FlatWeights, layout: PartitionLayout, compares: bool) -> None:
        self._optimizer, self._layout, self._compares = optimizer, layout, compares
        self._versions = [param._version for param in layout.params]
        self._set_masters: dict[int, int] = {}  # parameter id -> version of the weight when its master was set

    def link(self) -> None:
        """Let ``safe_set_full_fp32_param`` tell of the master weights that it sets; they are right, not the weights."""
        for param in self._layout.params:
            param.set_full_hp_param = partial(self._set_master, param)  # type: ignore[attr-defined]

    def _set_master(self, param: Parameter, value: torch.Tensor, optim_state_key: str | None = None) -> None:
        set_full_hp_param(param, value, optim_state_key)
        if optim_state_key is None:
            self._set_masters[self._layout.id_of(param)] = param._version

    @torch.no_grad()
    def adopt(self) -> None:
        """Take over what was written since the last call (this rank only; offload copies weights to the host)."""
        taken_over: set[int] = set()
        for group in self._layout.groups:
            moved = self._bring_back(group.index)
            taken_over |= moved
            masters = self._optimizer.single_partition_of_fp32_groups[group.index].detach()
            rank = dist.get_rank(group=group.process_group)
            weights = self._optimizer.bit16_groups_flat[group.index].narrow(
                0, rank * group.partition_size, group.partition_size
            )
            for start, stop in self._stretches(group, moved):
                adopt_elements(weights, masters, start, stop)
        for param_id in [each for each in self._set_masters if each in taken_over or self._counted(each)]:
            del self._set_masters[param_id]
        self._versions = [param._version for param in self._layout.params]

    def forget_set_masters(self) -> None:
        """Note that the weights are the masters, rounded. A skipped step, or saving, leaves those that were set."""
        self._set_masters.clear()

    def _stretches(self, group: GroupLayout, moved: set[int]) -> Iterator[tuple[int, int]]:
        """Return where to look in this rank's partition, in elements."""
        if not self._compares:
            places = (place for param_id, place in group.owned.items() if param_id in moved or self._counted(param_id))
            yield from ((place.offset, place.offset + place.numel) for place in places)
            return
        start = 0
        for place in sorted(self._places_of_set_masters(group, moved), key=lambda place: place.offset):
            yield start, place.offset
            start = place.offset + place.numel
        yield start, group.partition_size

    def _counted(self, param_id: int) -> bool:
        version = self._layout.params[param_id]._version
        return version != self._set_masters.get(param_id, self._versions[param_id])

    def _places_of_set_masters(self, group: GroupLayout, moved: set[int]) -> list[Place]:
        kept = {param_id for param_id in self._set_masters.keys() - moved if not self._counted(param_id)}
        return [group.owned[param_id] for param_id in kept & group.owned.keys()]

    def _bring_back(self, index: int) -> set[int]:
        """Copy parameters whose ``data`` was replaced into the flat memory; return their ids.

        Raises:
            ValueError: a parameter has another shape than when the engine was built.
        """
        optimizer, flat = self._optimizer, self._optimizer.bit16_groups_flat[index]
        moved = set()
        for param, meta, offset in zip(
            optimizer.round_robin_bit16_groups[index],
            optimizer.round_robin_bit16_meta[index],
            optimizer.round_robin_bit16_offsets[index],
            strict=True,
        ):
            # An empty one was released on purpose, and gets its memory back with the step.
            if model_weights.is_view_of(flat, param, meta, offset) or (param.numel() == 0 and meta.numel() > 0):
                continue
            if param.shape != meta.shape:
                raise ValueError(
                    f"A parameter of shape {tuple(meta.shape)} has the shape {tuple(param.shape)} since the engine was "
                    "built: build the engine after such a change."
                )
            flat.narrow(0, offset, meta.numel()).copy_(param.detach().reshape(-1))
            moved.add(self._layout.id_of(param))
        if moved:
            optimizer._update_model_bit16_weights(index)
        return moved
