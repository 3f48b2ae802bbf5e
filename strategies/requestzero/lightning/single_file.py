"""One file with fp32 weights from a checkpoint: ``python -m requestzero.lightning.single_file FOLDER FILE``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

from requestzero.lightning.module_state import CHANGED


def to_single_file(checkpoint: str | Path, file: str | Path) -> None:
    """Write one file in Lightning's own format, which ``load_from_checkpoint`` and other strategies read.

    It holds everything but the optimizer state. The weights are the master weights, or what a hook has put in their
    place, such as an average.

    Args:
        checkpoint: a folder that ``ModelCheckpoint`` or ``trainer.save_checkpoint`` has written.
        file: is overwritten.

    Raises:
        FileNotFoundError: ``checkpoint`` is no such folder.
        ValueError: a hook had changed the ``state_dict`` of a stage-3 checkpoint, which holds no whole weights.
    """
    states_file = Path(checkpoint) / "checkpoint" / "mp_rank_00_model_states.pt"
    stage_3_file = states_file.with_name(f"zero_pp_rank_0_{states_file.name}")
    is_stage_3 = stage_3_file.is_file()
    if is_stage_3:
        states_file = stage_3_file
    if not states_file.is_file():
        raise FileNotFoundError(
            f"{checkpoint} is not the folder of a checkpoint of RequestZeRO: {states_file} is missing."
        )
    states: dict[str, Any] = torch.load(states_file, map_location="cpu", weights_only=False)
    if is_stage_3 and states.get(CHANGED):
        raise ValueError(
            f"{checkpoint} is a checkpoint of ZeRO stage 3 whose state_dict a hook has changed, and which "
            "holds no whole weights: make a file of the master weights with lightning.pytorch.utilities.deepspeed."
            "convert_zero_checkpoint_to_fp32_state_dict, and apply the hook's change to it."
        )
    convert_zero_checkpoint_to_fp32_state_dict(checkpoint, file)
    if states.get(CHANGED):
        result = torch.load(file, map_location="cpu", weights_only=False)
        result["state_dict"] = {name: _as_fp32(value) for name, value in states["module"].items()}
        torch.save(result, file)


def _as_fp32(value: Any) -> Any:
    return value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(prog="python -m requestzero.lightning.single_file", description=__doc__)
    parser.add_argument("checkpoint", help="folder of the checkpoint")
    parser.add_argument("file", help="file to write")
    to_single_file(**vars(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
