"""Accelerate's ``Accelerator`` for a :class:`~requestzero.accelerate.plugin.RequestZeROPlugin`."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.scheduler import AcceleratedScheduler
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from requestzero.accelerate.checks import check_arguments, check_objects, check_steps
from requestzero.accelerate.clipping import check_parameters
from requestzero.accelerate.engine import RequestZeROEngineWrapper
from requestzero.accelerate.engine_config import choose_sizes, data_loaders, engine_config
from requestzero.accelerate.optimizer import RequestZeROOptimizerWrapper
from requestzero.accelerate.passes import share_passes
from requestzero.accelerate.plugin import RequestZeROPlugin
from requestzero.accelerate.process_group import process_group
from requestzero.accelerate.requests import MicroBatches
from requestzero.data.micro_batch_loader import MicroBatchLoader
from requestzero.zero.process_group import without_inference_operator

_INSTALLED = "_requestzero_installed"


def install() -> None:
    """Let every ``Accelerator`` that is given a ``RequestZeROPlugin`` become a :class:`RequestZeROAccelerator`.

    # HACK: nothing of a plugin is called after ``deepspeed.initialize``, and a plugin never meets its Accelerator: its
    # constructor is where they come together. Without one of our plugins it does what it did. Done once.
    """
    original = Accelerator.__init__
    if hasattr(original, _INSTALLED):
        return

    @functools.wraps(original)
    def __init__(self: Accelerator, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(original).bind(self, *args, **kwargs).arguments
        plugins = _plugins(given.get("deepspeed_plugin") or given.get("deepspeed_plugins"))
        if any(isinstance(plugin, RequestZeROPlugin) for plugin in plugins):
            check_arguments(given, os.environ)
        original(self, *args, **kwargs)
        if any(isinstance(plugin, RequestZeROPlugin) for plugin in _plugins(_state_plugins(self))):
            _become(self)

    setattr(__init__, _INSTALLED, True)
    Accelerator.__init__ = __init__  # type: ignore[method-assign]


def _plugins(given: Any) -> list[Any]:
    return list(given.values()) if isinstance(given, Mapping) else [given]


def _state_plugins(accelerator: Accelerator) -> Any:
    return vars(accelerator.state).get("deepspeed_plugins")


def _become(accelerator: Any) -> None:
    cls = type(accelerator)
    if not issubclass(cls, RequestZeROAccelerator):
        bases = (RequestZeROAccelerator,) if cls is Accelerator else (RequestZeROAccelerator, cls)
        accelerator.__class__ = bases[0] if len(bases) == 1 else type(cls.__name__, bases, {})
    plugin = accelerator.deepspeed_plugin
    if isinstance(plugin, RequestZeROPlugin):
        accelerator.take_steps(plugin)


class RequestZeROAccelerator(Accelerator):
    """What an ``Accelerator`` becomes; users build an ``Accelerator``. Written for Accelerate 1.15.

    Where the selected plugin is another one, and for an engine that was prepared under another one, everything is as
    in Accelerate.
    """

    deepspeed_engine_wrapped: Any
    _logs_metrics = False
    """Whether :meth:`log` adds the metrics of the engine that was prepared."""

    @property
    def engine_wrapper(self) -> RequestZeROEngineWrapper | None:
        """The request-safe engine that this Accelerator has prepared, if it has."""
        wrapped = self.deepspeed_engine_wrapped
        return wrapped if isinstance(wrapped, RequestZeROEngineWrapper) else None

    def take_steps(self, plugin: RequestZeROPlugin) -> None:
        """Take ``gradient_accumulation_steps`` over from the plugin's places, where they say it.

        Raises:
            ValueError: the Accelerator has another value.
        """
        self.gradient_accumulation_steps = check_steps(plugin, self.gradient_state.num_steps)

    @override
    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        plugin = self.deepspeed_plugin
        if not isinstance(plugin, RequestZeROPlugin):
            return super()._prepare_deepspeed(*args)
        args = tuple(MicroBatches(self, item) if isinstance(item, MicroBatchLoader) else item for item in args)
        check_objects(self, args)
        self.take_steps(plugin)
        result = self._prepare_with_our_engine(plugin, args)
        if any(isinstance(item, torch.nn.Module) for item in args):
            return self._wrap(plugin, result)
        return tuple(self._wrap_scheduler(item) if isinstance(item, LRScheduler) else item for item in result)

    def _prepare_with_our_engine(self, plugin: RequestZeROPlugin, args: tuple[Any, ...]) -> tuple[Any, ...]:
        import deepspeed

        from requestzero.zero.engine import RequestZeROEngine
        from requestzero.zero.patch import patched

        steps = self.gradient_state.num_steps
        config = plugin.deepspeed_config
        sizes = choose_sizes(config, data_loaders(args), plugin.is_train_batch_min, steps, self.num_processes)
        engine_class = partial(RequestZeROEngine, options=plugin.engine_options)
        self.gradient_accumulation_steps = 1  # as in the engine's config, else Accelerate takes that over
        try:
            with (
                engine_config(config, sizes, plugin.plan.clipping),
                process_group(),
                without_inference_operator(),
                patched(deepspeed, "DeepSpeedEngine", engine_class),
            ):
                return super()._prepare_deepspeed(*args)
        finally:
            self.gradient_accumulation_steps = steps

    def _wrap(self, plugin: RequestZeROPlugin, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put our wrappers in the places of Accelerate's, wherever those are kept."""
        stock = self._optimizers.pop()
        wrapper = RequestZeROEngineWrapper(
            self.deepspeed_engine_wrapped.engine,
            plugin.settings.normalization,
            lambda: self.gradient_state.num_steps,
            plugin.plan.clipping,
        )
        self.deepspeed_engine_wrapped = wrapper
        self._logs_metrics = plugin.settings.log_metrics
        optimizer = RequestZeROOptimizerWrapper(stock.optimizer, wrapper)
        self._optimizers.append(optimizer)
        for scheduler in self._schedulers:
            scheduler.optimizers = [optimizer if item is stock else item for item in scheduler.optimizers]
        return tuple(optimizer if item is stock else item for item in result)

    def _wrap_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """A scheduler that is prepared after the optimizer; Accelerate would leave it as it is under DeepSpeed."""
        wrapped = AcceleratedScheduler(
            scheduler,
            self._optimizers[-1],
            step_with_optimizer=self.step_scheduler_with_optimizer,
            split_batches=self.split_batches,
        )
        self._schedulers.append(wrapped)
        return wrapped

    @override
    def prepare_data_loader(self, *args: Any, **kwargs: Any) -> Any:
        """Also let the ranks know of each other's passes over it."""
        loader = super().prepare_data_loader(*args, **kwargs)
        return share_passes(loader, lambda: self.engine_wrapper) if self.num_processes > 1 else loader

    @contextmanager
    @override
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """Every micro-batch is a request, at stage 1 too: nothing is kept from being reduced.

        Raises:
            RuntimeError: within a pass over a loader of ``MicroBatch``, or within ``request()``.
        """
        wrapper = self.engine_wrapper
        if wrapper is None:
            with super().accumulate(*models):
                yield
            return
        if wrapper.request_end is not None:
            raise RuntimeError(
                "accelerator.accumulate() counts micro-batches, but the ends of requests are being marked (by "
                "request() or a loader of MicroBatch), which decide where windows end: leave accumulate() out."
            )
        wrapper.begin_block()
        with super().accumulate():
            yield

    @contextmanager
    @override
    def no_sync(self, model: Any) -> Iterator[None]:
        """Nothing at stage 2, which has to reduce in every backward, whichever plugin is selected now."""
        wrapper = self.engine_wrapper
        if wrapper is not None and model is wrapper.engine and wrapper.engine.zero_optimization_partition_gradients():
            yield
            return
        with super().no_sync(model):
            yield

    @override
    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Also what :meth:`RequestZeROPlugin.metrics` gives: once after each update, and what ``values`` lacks."""
        wrapper = self.engine_wrapper
        if wrapper is not None and self._logs_metrics and self.is_main_process:
            own = wrapper.take_metrics()
            values = {**values, **{name: value for name, value in own.items() if name not in values}}
        super().log(values, step=step, log_kwargs=log_kwargs)

    @override
    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        """Norm of the pending window's divided gradient, a scalar; the next step clips at ``max_norm``. Collective.

        Args:
            parameters: all of the model's.
            max_norm: what the configured clipping is, or any norm where nothing is configured; infinity only asks for
                the norm.
            norm_type: 2.

        Raises:
            ValueError: another norm, other parameters, or a ``max_norm`` that contradicts the configured clipping.
            RuntimeError: inside ``no_sync`` or inside a request.
        """
        wrapper = self.engine_wrapper
        if wrapper is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        if norm_type != 2:
            raise ValueError(f"clip_grad_norm_(norm_type={norm_type!r}) is not possible with ZeRO: use the 2-norm.")
        check_parameters(wrapper.engine, parameters)
        return wrapper.clip(float(max_norm))
