"""Arguments of Transformers' Trainer."""

from __future__ import annotations

import tempfile
from typing import Any

import torch


def quiet(**options: Any) -> dict[str, Any]:
    """These arguments, beside those with which nothing is shown, logged to a service or saved."""
    return {
        "output_dir": tempfile.mkdtemp(),
        "report_to": [],
        "disable_tqdm": True,
        "save_strategy": "no",
        **options,
    }


def with_documented_line(deepspeed: Any, arguments: dict[str, Any], **plugin: Any) -> Any:
    """``TrainingArguments`` that get the plugin in the line that the README shows; without ``deepspeed``, none."""
    from transformers import TrainingArguments

    from requestzero import RequestZeROPlugin

    args = TrainingArguments(use_cpu=not torch.cuda.is_available(), deepspeed=deepspeed, **arguments)
    if deepspeed is not None:
        args.deepspeed_plugin = RequestZeROPlugin(hf_ds_config=args.hf_deepspeed_config, **plugin)
    return args
