"""The plugin for Accelerate.

Written for Accelerate 1.15.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, fields, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from accelerate.utils import DeepSpeedPlugin
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from typing_extensions import override

from requestzero.accelerate.changes import find_changes
from requestzero.accelerate.launch import SAVE_16BIT, launched_precision, precision_config
from requestzero.accelerate.options import OWN_KEYS, OWN_OPTIONS, load_deepspeed_config
from requestzero.accelerate.plan import Plan, make_plan
from requestzero.accelerate.process_group import join_ranks
from requestzero.accelerate.request_safe_plugin import RequestSafePlugin
from requestzero.accelerate.zero3_init import leave_modules_whole, said_init_flag
from requestzero.config.merge import overlay
from requestzero.config.nested import look_up, update
from requestzero.config.options import OverflowSettings
from requestzero.config.overflow import merged_overflow, overflow_to_config
from requestzero.config.own_keys import pop_own_keys
from requestzero.config.precision import precision_of
from requestzero.config.stage_3 import STAGE as STAGE_3
from requestzero.config.translation import AUTO
from requestzero.environment.versions import require_supported_deepspeed, require_supported_stage_3

if TYPE_CHECKING:
    from accelerate import Accelerator

    from requestzero.accelerate.requests import Requests


# Fields that are no changes when they are set: Trainer puts an equal config in, and the flag is read where it counts.
_LIVE = ("hf_ds_config", "zero3_init_flag")
# Arguments whose value a trial of a hyperparameter search may choose.
_SEARCHED = ("gradient_accumulation_steps", "gradient_clipping")


@dataclass
class RequestZeROPlugin(DeepSpeedPlugin, RequestSafePlugin):
    """ZeRO 1, 2 or 3 in which every optimizer step applies exactly the sum of its window's requests.

    ``Accelerator(deepspeed_plugin=RequestZeROPlugin(...))``: the engine that ``accelerator.prepare`` builds is the
    request-safe one, and ``optimizer.step()`` is what steps; ``accelerator.backward`` never does. In a loop with
    ``accelerator.accumulate`` every micro-batch is a request and ``gradient_accumulation_steps`` requests make an
    update, the one that the same loop makes without DeepSpeed. :meth:`requests` is for requests of several
    micro-batches and windows of any number of requests.

    By default the step divides by the number of the window's micro-batches (``normalization="mean"``), as in other
    front ends and unlike ``engine.step()``, which divides by nothing unless asked.

    The first plugin that is built patches the constructor of ``accelerate.Accelerator``, unless the program has
    imported :class:`requestzero.accelerate.Accelerator`, to use that in its place.

    Settings come from the arguments, from ``options``, from a DeepSpeed config and from ``accelerate launch`` with its
    config file. All are merged; what two places say differently is an error. ``"auto"`` leaves a value to the other
    places, or to what is known when ``prepare`` is called.

    Args:
        hf_ds_config: A DeepSpeed config: a dict, an OmegaConf object, the path of a JSON or YAML file (or
            ``pkg://package/path``). Merged with the file that accelerate's ``deepspeed_config_file`` names.
        gradient_accumulation_steps: Requests per window, as ``Accelerator(gradient_accumulation_steps=...)``.
        gradient_clipping: Largest norm of the window's gradient. Not given (or ``"auto"``): what
            ``accelerator.clip_grad_norm_`` is called with, and no clipping where it is not called.
        zero_stage: 1, 2 (the default) or 3.
        is_train_batch_min: As in ``DeepSpeedPlugin``.
        offload_optimizer_device: ``"none"`` or ``"cpu"``.
        offload_param_device: Stage 3: likewise, for this rank's part of the weights while nothing needs it.
        zero3_init_flag: Stage 3: whether models that Transformers builds are sharded at once (the default), also by
            ``from_pretrained``. Else ``generate`` does not know that the ranks have to run it together, and needs
            ``synced_gpus=True``.
        zero3_save_16bit_model: Stage 3: whether ``accelerator.get_state_dict`` and ``save_model`` gather the weights,
            in the model's dtype. Without it they raise an error.
        retain_gpu_grad_partition_until_step: See :class:`~requestzero.config.options.RequestZeROSettings`, as for the
            following ones.
        grad_accum_dtype: dtype of the window's running sum.
        normalization: What the window's sum is divided by: ``"mean"`` (the default), ``"sum"`` or ``"token"``.
        overflow: :class:`~requestzero.config.options.OverflowSettings` or a mapping of its fields.
        log_metrics: Whether ``accelerator.log`` adds :meth:`metrics`.
        reduce_gradients_at: When gradients are summed over the ranks.
        rank_agreement: Whether the ranks agree on every request.
        rank_dependent_micro_batches: Whether ranks may run different numbers of micro-batches in a window.
        rank_dependent_parameters: Whether parameters may take part on some ranks only.
        compare_weights: Whether weights that were written through ``param.data`` count.
        abort: Whether any request can be aborted (:class:`~requestzero.AbortRequest` in ``requests.request()``).
        options: A YAML or JSON file, a dict or an OmegaConf object with options by their names in
            :class:`~requestzero.config.options.RequestZeROSettings`.

    The other arguments of ``DeepSpeedPlugin`` belong to NVMe offload or MS-AMP and are refused.

    Raises:
        ImportError: the installed DeepSpeed is not supported, or transformers, which Accelerate's DeepSpeed path
            needs, is missing.
        ValueError: a value that is not allowed, an option that does not apply, or one that was given twice with
            different values.
        FileNotFoundError: a file that is named does not exist.
        RuntimeError: an Accelerate state exists already, in which the ranks do not know each other.
    """

    hf_ds_config: Any = field(default=None)
    retain_gpu_grad_partition_until_step: bool | str | None = field(default=None)
    grad_accum_dtype: str | None = field(default=None)
    normalization: str | None = field(default=None)
    overflow: OverflowSettings | Mapping[str, Any] | None = field(default=None)
    log_metrics: bool | None = field(default=None)
    reduce_gradients_at: str | None = field(default=None)
    rank_agreement: bool | None = field(default=None)
    rank_dependent_micro_batches: bool | None = field(default=None)
    rank_dependent_parameters: bool | None = field(default=None)
    compare_weights: bool | None = field(default=None)
    abort: bool | None = field(default=None)
    options: Any = field(default=None)

    @override
    def __post_init__(self) -> None:
        """Merge all places of the configuration first, so that Accelerate's version reads one that they agree on."""
        require_supported_deepspeed()
        _require_transformers()
        given = {item.name: getattr(self, item.name) for item in fields(RequestZeROPlugin)}
        plan = make_plan(given, os.environ)
        self._given = {name: value for name, value in given.items() if name != "hf_ds_config"}
        self._said_init_flag = said_init_flag(given["zero3_init_flag"], os.environ, plan.settings.stage)
        self.zero3_init_flag = self._said_init_flag
        if plan.settings.stage == STAGE_3:
            require_supported_stage_3()
        from requestzero.accelerate.patch import install_if_needed

        install_if_needed()
        join_ranks()
        self.plan = plan
        self._precision_known = False
        self._adopt(plan)
        super().__post_init__()
        if "steps_per_print" in plan.config:
            self.deepspeed_config["steps_per_print"] = plan.config["steps_per_print"]
        self.note_state()

    @override
    def again(self, hf_ds_config: Any) -> RequestZeROPlugin:
        """Return a new plugin with the same arguments but those that another DeepSpeed config says."""
        config = load_deepspeed_config(hf_ds_config)
        said = {name: None for name in _SEARCHED if config.get(name, AUTO) != AUTO}
        plugin = copy.copy(self)  # with what a subclass has
        for name, value in {**self._given, **said, "hf_ds_config": hf_ds_config, "adopted_steps": None}.items():
            setattr(plugin, name, value)
        plugin.__post_init__()
        return plugin

    def _adopt(self, plan: Plan) -> None:
        """Set the fields that Accelerate's part of the construction reads to what the plan says."""
        if isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            # Transformers' Trainer goes on with this object.
            self.hf_ds_config.config = copy.deepcopy(plan.config)
        else:
            self.hf_ds_config = HfDeepSpeedConfig(plan.config)
        self._adopt_settings(plan)

    def _adopt_settings(self, plan: Plan) -> None:
        settings = plan.settings
        setattr(self.hf_ds_config, OWN_KEYS, plan.own)
        self.zero_stage = settings.stage
        self.offload_optimizer_device = "cpu" if settings.offload_optimizer else "none"
        self.offload_param_device = "cpu" if settings.offload_parameters else "none"
        self.zero3_save_16bit_model = look_up(plan.config, SAVE_16BIT) is True
        self.gradient_accumulation_steps = AUTO if plan.steps is None else plan.steps
        self.gradient_clipping = AUTO if plan.clipping is None else plan.clipping
        for name in {item.name for item in fields(RequestZeROPlugin)}.intersection(OWN_OPTIONS):
            setattr(self, name, getattr(settings, name))

    @override
    def note_state(self) -> None:
        """Note the public config and attributes as they are now."""
        self._state = copy.deepcopy(self.deepspeed_config), self._arguments()

    def _arguments(self) -> dict[str, Any]:
        names = [item.name for item in fields(RequestZeROPlugin) if item.name not in _LIVE]
        return {name: copy.deepcopy(getattr(self, name)) for name in names}

    @override
    def take_over_changes(self) -> None:
        """Take over what was set in the public config and in attributes since the plugin was built.

        Raises:
            ValueError: it is not allowed, does not apply, or two places say different values.
        """
        config, arguments = self._state
        own = pop_own_keys(self.deepspeed_config)
        changes = find_changes((config, self.deepspeed_config), own, (arguments, self._arguments()))
        if not changes:
            return
        before = self.plan.settings.stage
        self.plan = self.plan.changed(changes)
        if self.plan.settings.stage != before:
            self._change_stage(self.plan.settings.stage)
        for source in changes.sources:
            update(self.deepspeed_config, source.config)
        pop_own_keys(self.deepspeed_config)
        self.hf_ds_config.config = self.deepspeed_config
        self.hf_ds_config.set_stage_and_offload()
        self._adopt_settings(self.plan)
        if self._precision_known:
            self._put_overflow_in()
        self.note_state()

    def _change_stage(self, stage: int) -> None:
        if stage == STAGE_3:
            require_supported_stage_3()
        said = self._said_init_flag
        self.zero3_init_flag = stage == STAGE_3 and said is not False

    @override
    def set_deepspeed_weakref(self) -> None:
        """Also act on a ``zero3_init_flag`` that is false: Accelerate's version has models sharded all the same."""
        super().set_deepspeed_weakref()
        if self.settings.stage == STAGE_3 and not self.zero3_init_flag:
            leave_modules_whole()

    def requests(self, accelerator: Accelerator) -> Requests:
        """Return the interface for requests of several micro-batches, in a loop with ``accelerator``."""
        from requestzero.accelerate.requests import Requests

        return Requests(accelerator)

    def gradients(self, accelerator: Accelerator) -> AbstractContextManager[None]:
        """Let ``p.grad`` be the open window's gradient in a block, and let its changes count. Collective.

        Between the window's last backward and ``optimizer.step()``, at stages 1 and 2. The gradient is summed over the
        window, averaged over ranks and divided as the step divides it; each rank holds all of it in the block.

        Example::

            if accelerator.sync_gradients:
                with plugin.gradients(accelerator):
                    for parameter in model.parameters():
                        parameter.grad.mul_(0.5)
            optimizer.step()

        Args:
            accelerator: one that has prepared a model with such a plugin.

        Returns:
            The block.

        Raises:
            NotImplementedError: at stage 3, where no rank has whole gradients.
            RuntimeError: inside ``no_sync`` or inside a request; or ``accelerator`` has prepared no such model.
        """
        from requestzero.accelerate.engine_access import engine_wrapper_of

        return engine_wrapper_of(accelerator).clipping.whole_gradients("plugin.gradients()")

    def metrics(self, accelerator: Accelerator) -> dict[str, float]:
        """Return what ``accelerator.log`` adds by itself: ``overflow/...`` and the last update's ``grad_norm``.

        For trackers that ``accelerator.log`` does not reach; see :func:`~requestzero.zero.metrics.logged_metrics`.

        Raises:
            RuntimeError: ``accelerator`` has not prepared a model with such a plugin.
        """
        from requestzero.accelerate.engine_access import engine_wrapper_of

        return engine_wrapper_of(accelerator).metrics()

    @override
    def _deepspeed_config_checks(self) -> None:
        """Check nothing: the plan compares. Accelerate's version refuses what two files say, even if they agree."""

    @override
    def deepspeed_config_process(self, *args: Any, **kwargs: Any) -> None:
        """Also refuse an Accelerator that would build a stock engine: it calls this for every engine.

        Raises:
            RuntimeError: the Accelerator is not one of ours.
        """
        if not self.builds_engine:
            raise RuntimeError(
                "accelerate.Accelerator would build a stock DeepSpeed engine from this RequestZeROPlugin, since the "
                "program has imported requestzero.accelerate.Accelerator and so has nothing patched: use that class "
                "for every Accelerator with the plugin (and RequestZeROTrainingArguments for transformers' Trainer)."
            )
        super().deepspeed_config_process(*args, **kwargs)

    @override
    def set_mixed_precision(self, mixed_precision: str) -> None:
        """Also compare the precision with the DeepSpeed config, and put the overflow options in.

        Raises:
            ValueError: the config or an overflow option is for another precision, or the device cannot do it.
        """
        self.take_over_changes()
        self._check_precision(mixed_precision)
        for name in ("bf16", "fp16"):
            if name in self.deepspeed_config:  # Accelerate looks at sections that say "auto" only
                self.deepspeed_config[name].setdefault("enabled", AUTO)
        super().set_mixed_precision(mixed_precision)
        self._put_overflow_in()
        self._precision_known = True
        self.note_state()

    def _put_overflow_in(self) -> None:
        """Put the overflow options into the config, by the keys of its precision."""
        chosen = precision_of(self.deepspeed_config)
        if chosen == "fp16":
            _check_fp16()
        overflow = merged_overflow(self.settings.overflow, self.plan.written, chosen)
        # In place: the object that holds the config holds the same dict.
        update(self.deepspeed_config, overflow_to_config(overflow, chosen))
        own = overlay(self.plan.own, pop_own_keys(self.deepspeed_config))
        self.overflow = overflow
        self.plan = replace(self.plan, own=own, settings=replace(self.settings, overflow=overflow))

    def _check_precision(self, mixed_precision: str) -> None:
        wanted = precision_config(mixed_precision)
        said = mixed_precision != "no" or launched_precision(os.environ) not in (None, "no")
        for name, section in wanted.items():
            enabled = look_up(self.deepspeed_config, f"{name}.enabled")
            if said and enabled not in (None, AUTO, section["enabled"]):
                raise ValueError(
                    f"{name}.enabled is {enabled!r} in {self.plan.places_of(f'{name}.enabled')}, but the "
                    f"Accelerator has mixed_precision={mixed_precision!r}: set the precision in one place, or to the "
                    "same value."
                )


def _require_transformers() -> None:
    if find_spec("transformers") is None:
        raise ImportError(
            "Accelerate's DeepSpeed path needs transformers, which is not installed. Run: pip install "
            '"requestzero[accelerate]"'
        )


def _check_fp16() -> None:
    from deepspeed.accelerator import get_accelerator

    if not get_accelerator().is_fp16_supported():
        raise ValueError(
            f"fp16 is not possible on {get_accelerator().device_name()}, where DeepSpeed refuses it: use "
            "mixed_precision bf16 or no."
        )
