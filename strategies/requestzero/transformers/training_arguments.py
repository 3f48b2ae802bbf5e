"""Training arguments for request-safe ZeRO in Transformers' ``Trainer``.

Written for Transformers 5.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import DeepSpeedPlugin, parse_flag_from_env, patch_environment
from transformers import TrainingArguments
from typing_extensions import override

from requestzero.accelerate.launch import launched_sources
from requestzero.accelerate.plugin import RequestZeROPlugin
from requestzero.config.files import is_in_package, load_config
from requestzero.config.merge import merge
from requestzero.config.nested import Config
from requestzero.zero.process_group import without_inference_operator


class RequestZeROTrainingArguments(TrainingArguments):
    """``TrainingArguments`` whose ``deepspeed=`` makes a ``RequestZeROPlugin``.

    Also a mixin for what derives from ``TrainingArguments``, before or after it, with or without ``@dataclass``::

        class Arguments(RequestZeROTrainingArguments, SFTConfig):
            pass

    It has no fields of its own and changes no default of the other class.

    ``deepspeed`` is a dict, an OmegaConf object, or the path of a JSON or YAML file, with
    ``zero_optimization.retain_gpu_grad_partition_until_step`` and all else in its place there. On a machine without an
    accelerator the ranks are joined with gloo. A hyperparameter search makes our plugin again too.

    Trainer has divided the losses when it calls ``accelerator.backward``, so the step divides no more: the mean over
    the window is Trainer's own. Its ``grad_norm`` and clipping refer to the window.

    Raises:
        ValueError: there is no DeepSpeed config, neither here nor from ``accelerate launch``; and as
            :class:`~requestzero.RequestZeROPlugin` does.
        FileNotFoundError, ImportError: see :class:`~requestzero.RequestZeROPlugin`.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let the other bases come first.

        HACK: ``@dataclass`` takes the defaults of ``TrainingArguments``, which this class inherits, for those of this
        class, and lets them count in the place of a later base's. Moved behind that one it stands right before
        ``TrainingArguments``, where its methods do the same.
        """
        super().__init_subclass__(**kwargs)
        own = [base for base in cls.__bases__ if _is_mixin(base)]
        others = [base for base in cls.__bases__ if not _is_mixin(base)]
        if any(issubclass(base, TrainingArguments) for base in others):
            cls.__bases__ = (*others, *own)

    @override
    def __post_init__(self) -> None:
        """Also read YAML and what ``accelerate launch`` passes on, and choose the CPU where there is nothing else."""
        if self.deepspeed is None:
            self.deepspeed = _launched_config()
        elif not _is_json(self.deepspeed):
            self.deepspeed = load_config(self.deepspeed, "TrainingArguments(deepspeed=...)")
        if torch.accelerator.current_accelerator(check_available=True) is None:
            self.use_cpu = True
        # Transformers builds a stock plugin first, which refuses what accelerate's YAML and the file both say.
        with without_inference_operator(), patch_environment(ACCELERATE_CONFIG_DS_FIELDS=""):
            super().__post_init__()

    @override
    def __setattr__(self, name: str, value: Any) -> None:
        """Replace a stock plugin by ours: Transformers assigns one in several places, also after this is built."""
        if name == "deepspeed_plugin" and isinstance(value, DeepSpeedPlugin):
            value = as_request_zero(value)
        super().__setattr__(name, value)


def _is_mixin(base: type) -> bool:
    """Return true for our class and for subclasses that have no fields of their own."""
    return issubclass(base, RequestZeROTrainingArguments) and "__dataclass_fields__" not in vars(base)


def as_request_zero(plugin: DeepSpeedPlugin) -> RequestZeROPlugin:
    """Return a ``RequestZeROPlugin`` with the plugin's DeepSpeed config object, or the plugin if it is one already.

    Raises:
        ValueError: it would drop requests, whose losses Trainer has divided already.
    """
    from requestzero.accelerate.patch import install

    install()  # Trainer builds an accelerate.Accelerator
    ours = plugin if isinstance(plugin, RequestZeROPlugin) else RequestZeROPlugin(hf_ds_config=plugin.hf_ds_config)
    if ours.settings.overflow.on_overflow == "drop_request":
        from requestzero.accelerate.engine import DROP_AFTER_DIVISION

        raise ValueError(DROP_AFTER_DIVISION)
    return ours


def _launched_config() -> Config:
    """Return the DeepSpeed config of ``accelerate launch``, for a run without one in the arguments."""
    if not parse_flag_from_env("ACCELERATE_USE_DEEPSPEED"):
        raise ValueError(
            "RequestZeROTrainingArguments has no deepspeed=... and the ranks were not launched with DeepSpeed, so "
            "there would be no ZeRO: give it a DeepSpeed config, or use TrainingArguments."
        )
    return merge(*launched_sources(os.environ))


def _is_json(config: Any) -> bool:
    """Return True for a config that Transformers reads by itself, and keeps for its own later use."""
    if isinstance(config, dict):
        return True
    if not isinstance(config, (str, os.PathLike)) or is_in_package(config):
        return False
    return Path(config).suffix not in (".yaml", ".yml")
