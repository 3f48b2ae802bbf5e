"""One file with fp32 weights from a checkpoint of any stage and any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from safetensors.torch import save_file

from requestzero.checkpoint.location import Location
from requestzero.zero.checkpoint.files import is_universal, read_states

LIGHTNING_KEY = "pytorch-lightning_version"
"""Key of a checkpoint that Lightning has written."""


def write_weights(source: Location, file: Path) -> None:
    """Write the master weights of a checkpoint, by parameter name.

    Of a checkpoint of Lightning its hooks' weights, such as an average; without safetensors it becomes a file in
    Lightning's own format, for ``load_from_checkpoint``.

    Args:
        source: the checkpoint.
        file: is overwritten; safetensors if it is named so, else what ``torch.load`` reads.

    Raises:
        ValueError: the checkpoint is converted; or Lightning's, of stage 3, and a hook has changed its ``state_dict``.
    """
    if is_universal(source.folder):
        raise ValueError(
            f"{source.folder} is in the universal format, for loading it: give the checkpoint that it was made of."
        )
    if LIGHTNING_KEY in read_states(source.model_files()[0]):
        weights = _write_lightning(source, file)
    else:
        weights = get_fp32_state_dict_from_zero_checkpoint(str(source.root), source.tag)
        if file.suffix != ".safetensors":
            torch.save(weights, file)
    if file.suffix == ".safetensors":
        save_file({name: value.clone().contiguous() for name, value in weights.items()}, file)


def _write_lightning(source: Location, file: Path) -> dict[str, Any]:
    from requestzero.lightning.single_file import to_single_file

    whole = file.with_name(f"{file.name}.ckpt") if file.suffix == ".safetensors" else file  # torch goes by the name
    to_single_file(source.root, whole)
    weights: dict[str, Any] = torch.load(whole, map_location="cpu", weights_only=False)["state_dict"]
    if whole != file:
        whole.unlink()
    return weights
