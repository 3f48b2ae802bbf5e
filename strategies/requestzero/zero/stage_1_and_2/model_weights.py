"""The 16-bit weights of ZeRO 1 and 2, which are views of one flat tensor per group."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from requestzero.zero.stage_1_and_2.layout import GroupLayout, Parameter


def are_views_of(
    flat: torch.Tensor, params: Iterable[Parameter], metas: Iterable[torch.Tensor], offsets: Iterable[int]
) -> bool:
    """Return whether every parameter is the view of ``flat`` at its offset, with the shape of its ``meta`` tensor."""
    return all(
        is_view_of(flat, param, meta, offset) for param, meta, offset in zip(params, metas, offsets, strict=True)
    )


def is_view_of(flat: torch.Tensor, param: Parameter, meta: torch.Tensor, offset: int) -> bool:
    """Return whether a parameter is the view of ``flat`` at its offset, with the shape of its ``meta`` tensor."""
    in_place = param.data_ptr() == flat.data_ptr() + offset * flat.element_size()
    return in_place and param.dtype == flat.dtype and param.shape == meta.shape and param.is_contiguous()


def number_fragments(groups: Iterable[GroupLayout], params: Sequence[Parameter]) -> None:
    """Let every owned parameter know its position among the owned ones of its group.

    DeepSpeed 0.19.8 looks up its gradient for ``safe_get_full_grad`` by this number, and counts padding too in places.
    """
    for group in groups:
        for number, param_id in enumerate(group.owned):
            params[param_id]._index_in_param_group = number  # type: ignore[attr-defined]
