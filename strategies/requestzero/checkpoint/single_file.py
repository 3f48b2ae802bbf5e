"""One file with fp32 weights from a checkpoint of any stage and any number of ranks."""

from __future__ import annotations

from pathlib import Path

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file

from requestzero.checkpoint.location import Location
from requestzero.zero.checkpoint.files import is_universal

_LIGHTNING_TAG = "checkpoint"


def write_weights(source: Location, file: Path) -> None:
    """Write the master weights of a checkpoint, by parameter name.

    A checkpoint of Lightning becomes a file in Lightning's own format, for ``load_from_checkpoint``.

    Args:
        source: the checkpoint.
        file: is overwritten; safetensors if it is named so, else what ``torch.load`` reads.

    Raises:
        ValueError: the checkpoint is converted; or one of Lightning's of stage 3 whose ``state_dict`` a hook has changed.
    """
    if is_universal(source.folder):
        raise ValueError(
            f"{source.folder} is in the universal format, for loading it: give the checkpoint that it was made of."
        )
    if is_of_lightning(source) and file.suffix != ".safetensors":
        from requestzero.lightning.single_file import to_single_file

        to_single_file(source.root, file)
        return
    weights: dict[str, torch.Tensor] = get_fp32_state_dict_from_zero_checkpoint(str(source.root), source.tag)
    if file.suffix == ".safetensors":
        save_file({name: value.clone().contiguous() for name, value in weights.items()}, file)
    else:
        torch.save(weights, file)


def is_of_lightning(source: Location) -> bool:
    """Return whether Lightning has written the checkpoint."""
    states = torch.load(source.model_files()[0], map_location="cpu", mmap=True, weights_only=False)
    return source.tag == _LIGHTNING_TAG and "pytorch-lightning_version" in states
