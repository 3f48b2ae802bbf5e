"""``zero3_init_flag``: whether modules are sharded as they are built, at stage 3.

Written for Accelerate 1.15 and Transformers 5, whose models look for a DeepSpeed config of stage 3 when they are built.
"""

from __future__ import annotations

from collections.abc import Mapping

from requestzero.accelerate.launch import launched_init_flag
from requestzero.accelerate.options import ARGUMENTS
from requestzero.config.merge import Source, merge
from requestzero.config.stage_3 import STAGE as STAGE_3

_NAME = "zero3_init_flag"


def said_init_flag(argument: bool | None, environ: Mapping[str, str], stage: int) -> bool | None:
    """Return what the argument and ``accelerate launch`` say; ``None`` leaves it to the stage.

    Args:
        argument: the plugin's.
        environ: the process's environment.
        stage: of ZeRO.

    Raises:
        ValueError: the two say different things, or the argument asks for it at another stage.
    """
    if argument and stage != STAGE_3:
        raise ValueError(
            f"{_NAME}=True does not apply at stage {stage}, where every rank builds whole modules: leave it out, or "
            "set zero_stage=3."
        )
    places = {ARGUMENTS: argument, f"accelerate's {_NAME}": launched_init_flag(environ)}
    said = [Source(place, {_NAME: value}) for place, value in places.items() if value is not None]
    return merge(*said).get(_NAME)


def leave_modules_whole() -> None:
    """Let models of Transformers be built whole from now on, though there is a config of stage 3."""
    from transformers.integrations import unset_hf_deepspeed_config

    unset_hf_deepspeed_config()
