"""Accelerate's ``Accelerator`` for a :class:`~requestzero.accelerate.plugin.RequestZeROPlugin`.

Written for Accelerate 1.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator as StockAccelerator
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils.deepspeed import DeepSpeedSchedulerWrapper
from torch.optim.lr_scheduler import LRScheduler
from typing_extensions import override

from requestzero.accelerate.checks import check_construction, check_objects, check_steps, replaced_by_cpu_adam
from requestzero.accelerate.config_scheduler import ConfigScheduler, start_scheduler
from requestzero.accelerate.engine import RequestZeROEngineWrapper
from requestzero.accelerate.engine_config import choose_sizes, data_loaders, engine_config
from requestzero.accelerate.micro_batches import MicroBatches
from requestzero.accelerate.optimizer import RequestZeROOptimizerWrapper
from requestzero.accelerate.passes import share_passes
from requestzero.accelerate.process_group import process_group
from requestzero.accelerate.request_safe_plugin import RequestSafePlugin, any_request_safe
from requestzero.accelerate.state_folders import newest_folder, read_tally, state_folder, write_tally
from requestzero.accelerate.trainer import install_if_imported
from requestzero.config.cpu_adam import builds_cpu_adam
from requestzero.data.micro_batch_loader import MicroBatchLoader
from requestzero.environment.cpu_adam import compile_cpu_adam
from requestzero.zero.process_group import without_inference_operator
from requestzero.zero.window_checkpoint.replacing import recover
from requestzero.zero.window_checkpoint.together import on_one_rank


class Accelerator(StockAccelerator):
    """``accelerate.Accelerator`` whose ``optimizer.step()`` applies update windows, given a ``RequestZeROPlugin``.

    There are two ways to get one, which are the same but for what is patched: importing this class in the place of
    ``accelerate.Accelerator``, before the plugin is built, or leaving the import as it is, where the plugin patches the
    constructor of ``accelerate.Accelerator``.

    A window's sum is divided by the number of its micro-batches unless the plugin's ``normalization`` says otherwise;
    ``engine.step()`` by itself divides by nothing unless asked.

    Without such a plugin, or where another one is selected, everything is as in Accelerate.

    Args:
        *args: as ``kwargs``, the arguments of ``accelerate.Accelerator``.

    Raises:
        ValueError: with one of our plugins, an argument that Accelerate would ignore, or a
            ``gradient_accumulation_steps`` that contradicts the plugin's.
    """

    deepspeed_engine_wrapped: Any
    _logs_metrics = False
    """True if :meth:`log` adds the metrics of the engine that was prepared."""
    has_trainer = False
    """True if it belongs to transformers' ``Trainer``, which calls :meth:`free_memory` at every ``train()``, and then
    goes on with model and optimizer, as without DeepSpeed."""
    _kept: tuple[RequestZeROEngineWrapper, list[Any]] | None = None
    """Wrapper and optimizers of a ``Trainer``'s last ``train()``, until the next."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        check_construction(args, kwargs)
        super().__init__(*args, **kwargs)
        self.adopt_plugin()

    __init__.__wrapped__ = StockAccelerator.__init__  # type: ignore[attr-defined]  # whose parameters help() shows

    @property
    def engine_wrapper(self) -> RequestZeROEngineWrapper | None:
        """Wrapper of the request-safe engine that was prepared; ``None`` before, and for a stock engine."""
        wrapped = getattr(self, "deepspeed_engine_wrapped", None)  # Accelerate sets it under DeepSpeed only
        return wrapped if isinstance(wrapped, RequestZeROEngineWrapper) else None

    def adopt_plugin(self) -> None:
        """Take over ``gradient_accumulation_steps`` from the selected plugin, if it is ours and has them.

        Raises:
            ValueError: the Accelerator has another value; or see :meth:`RequestSafePlugin.take_over_changes`.
        """
        plugin = self.deepspeed_plugin
        if isinstance(plugin, RequestSafePlugin):
            install_if_imported()
            plugin.take_over_changes()
            self.gradient_accumulation_steps = check_steps(plugin, self.gradient_state.num_steps)
            plugin.adopted_steps = plugin.plan.steps

    @override
    def _prepare_deepspeed(self, *args: Any) -> tuple[Any, ...]:
        """Build the request-safe engine, wrap it, and prepare loaders of ``MicroBatch`` and later schedulers too."""
        plugin = self.deepspeed_plugin
        if not isinstance(plugin, RequestSafePlugin):
            return super()._prepare_deepspeed(*args)
        if any(map(self._is_prepared, args)):
            return self._prepare_others(args)
        args = tuple(MicroBatches(self, item) if isinstance(item, MicroBatchLoader) else item for item in args)
        self.adopt_plugin()
        check_objects(self, args)
        result = self._prepare_with_our_engine(plugin, args)
        if any(isinstance(item, torch.nn.Module) for item in args):
            return self._wrap(plugin, result)
        return tuple(self._wrap_scheduler(item) if isinstance(item, LRScheduler) else item for item in result)

    def _is_prepared(self, item: Any) -> bool:
        wrapper = self.engine_wrapper
        return wrapper is not None and (item is wrapper.engine or any(item is known for known in self._optimizers))

    def _prepare_others(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Leave the engine and the optimizer that are prepared already as they are, as without DeepSpeed."""
        others = tuple(item for item in args if not self._is_prepared(item))
        prepared = iter(self._prepare_deepspeed(*others) if others else ())
        return tuple(item if self._is_prepared(item) else next(prepared) for item in args)

    @override
    def free_memory(self, *objects: Any) -> Any:
        """Let go of everything that was prepared, but for the engine of a ``Trainer``; see :attr:`has_trainer`."""
        if self.has_trainer and self.engine_wrapper is not None:
            self._kept, self.deepspeed_engine_wrapped = (self.engine_wrapper, [*self._optimizers]), None
        return super().free_memory(*objects)

    def take_back_engine(self, engine: Any) -> bool:
        """Prepare the engine that :meth:`free_memory` has kept again, if it is ``engine``; else destroy it.

        Returns:
            Whether it was.
        """
        kept, self._kept = self._kept, None
        if kept is None:
            return False
        wrapper, optimizers = kept
        if wrapper.engine is not engine:
            wrapper.engine.destroy()
            return False
        wrapper.engine.zero_grad()
        self.deepspeed_engine_wrapped = wrapper
        self._models.append(engine)
        self._optimizers.extend(optimizers)
        return True

    def release_engine(self) -> None:
        """Let :meth:`free_memory` destroy the engine next time, and destroy the one that it has kept."""
        self.take_back_engine(None)
        self.has_trainer = False

    def _prepare_with_our_engine(self, plugin: RequestSafePlugin, args: tuple[Any, ...]) -> tuple[Any, ...]:
        import deepspeed

        from requestzero.zero.engine import RequestZeROEngine
        from requestzero.zero.patch import patched

        steps = self.gradient_state.num_steps
        config = plugin.deepspeed_config
        if replaced_by_cpu_adam(config, args) or builds_cpu_adam(config):
            compile_cpu_adam()
        sizes = choose_sizes(config, data_loaders(args), plugin.is_train_batch_min, steps, self.num_processes)
        engine_class = partial(RequestZeROEngine, options=plugin.engine_options)
        self.gradient_accumulation_steps = 1  # as in the engine's config, else Accelerate takes that over
        try:
            with (
                plugin.building_engine(),
                engine_config(config, sizes, plugin.plan.clipping),
                process_group(),
                without_inference_operator(),
                patched(deepspeed, "DeepSpeedEngine", engine_class),
            ):
                return super()._prepare_deepspeed(*args)
        finally:
            plugin.note_state()
            self.gradient_accumulation_steps = steps

    def _wrap(self, plugin: RequestSafePlugin, result: tuple[Any, ...]) -> tuple[Any, ...]:
        """Put our wrappers in the places of Accelerate's, wherever those are kept."""
        stock = self._optimizers.pop()
        wrapper = RequestZeROEngineWrapper(
            self.deepspeed_engine_wrapped.engine,
            plugin.settings.normalization,
            self.gradient_state,
            plugin.plan.clipping,
        )
        self.deepspeed_engine_wrapped = wrapper
        self._logs_metrics = plugin.settings.log_metrics
        optimizer = RequestZeROOptimizerWrapper(stock.optimizer, wrapper)
        self._optimizers.append(optimizer)
        places: dict[int, Any] = {id(stock): optimizer}
        for index, scheduler in enumerate(self._schedulers):
            if isinstance(scheduler, DeepSpeedSchedulerWrapper):
                start_scheduler(scheduler.scheduler)
                self._schedulers[index] = ConfigScheduler(scheduler.scheduler, optimizer, wrapper)
                places[id(scheduler)] = self._schedulers[index]
            else:
                scheduler.optimizers = [places.get(id(item), item) for item in scheduler.optimizers]
        return tuple(places.get(id(item), item) for item in result)

    def _wrap_scheduler(self, scheduler: LRScheduler) -> AcceleratedScheduler:
        """Wrap a scheduler that is prepared after the optimizer, which Accelerate leaves as it is under DeepSpeed."""
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
        """Also tell the other ranks of passes over the loader, if one of the plugins is ours."""
        loader = super().prepare_data_loader(*args, **kwargs)
        if self.num_processes > 1 and any_request_safe(vars(self.state).get("deepspeed_plugins")):
            share_passes(loader, lambda: self.engine_wrapper)
        return loader

    @contextmanager
    @override
    def accumulate(self, *models: torch.nn.Module) -> Iterator[None]:
        """Count a block of the window. Accelerate's version keeps stage 1 from reducing before the window's end.

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
        with super().accumulate():
            wrapper.tally.begin_block(ends_window=self.sync_gradients)
            yield

    @contextmanager
    @override
    def no_sync(self, model: Any) -> Iterator[None]:
        """Do nothing at stages 2 and 3, which have to reduce in every backward, whichever plugin is selected now."""
        wrapper = self.engine_wrapper
        if wrapper is not None and model is wrapper.engine and wrapper.engine.zero_optimization_partition_gradients():
            yield
            return
        with super().no_sync(model):
            yield

    @override
    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any) -> Any:
        """Save as Accelerate does, inside an update window too, into a folder that appears as a whole. Collective.

        Args:
            output_dir: the folder; not needed where the project names folders itself.
            safe_serialization: as in Accelerate.
            **save_model_func_kwargs: for the engine's ``save_checkpoint``.

        Returns:
            The folder.

        Raises:
            RuntimeError: inside a request.
            RankDisagreementError: another rank does something else.
        """
        wrapper = self.engine_wrapper
        if wrapper is None:
            return super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
        agreement = wrapper.engine.agreement
        agreement.before_collective("accelerator.save_state")  # the folder is made together
        with wrapper.engine.failing_together(), state_folder(self, output_dir) as folder:
            super().save_state(str(folder), safe_serialization, **save_model_func_kwargs)
            if self.is_main_process:
                write_tally(folder, wrapper.tally.state())
            agreement.before_collective("the end of accelerator.save_state")
        named_by_project = self.project_configuration.automatic_checkpoint_naming
        return str(newest_folder(self)) if named_by_project else output_dir

    @override
    def load_state(
        self, input_dir: Any = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Load as Accelerate does, and go on inside the update window that was open in the checkpoint. Collective.

        Args:
            input_dir: the folder; the newest where the project names folders itself.
            load_kwargs: as in Accelerate.
            **load_model_func_kwargs: for the engine's ``load_checkpoint``, such as ``discard_window=True``.

        Raises:
            RankDisagreementError: another rank does something else.
        """
        wrapper = self.engine_wrapper
        if wrapper is not None and input_dir is None and self.project_configuration.automatic_checkpoint_naming:
            newest = newest_folder(self)
            input_dir = None if newest is None else str(newest)
        if wrapper is not None and input_dir is not None:
            folder = Path(input_dir).expanduser()
            wrapper.engine.agreement.before_collective("accelerator.load_state")
            on_one_rank(self.is_main_process, lambda: recover(folder))
        super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        if wrapper is not None and input_dir is not None:
            wrapper.resume(read_tally(folder))

    @override
    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> Any:
        """Let the ranks agree first at stage 3, where whole weights are gathered from all of them (collective there).

        Args:
            model: any; of the prepared one the weights are in its dtype.
            unwrap: as in Accelerate.

        Returns:
            Whole weights by name; on the first rank only at stage 3, ``None`` on others.

        Raises:
            ValueError: at stage 3 without ``zero3_save_16bit_model``.
            RankDisagreementError: another rank does something else.
        """
        wrapper = self.engine_wrapper
        if wrapper is not None and model is wrapper.engine and wrapper.engine.zero_optimization_partition_weights():
            wrapper.engine.agreement.before_collective("accelerator.get_state_dict")
        return super().get_state_dict(model, unwrap)

    @override
    def log(self, values: dict[str, Any], step: int | None = None, log_kwargs: dict[str, Any] | None = None) -> None:
        """Also log the metrics of :meth:`RequestZeROPlugin.metrics` that ``values`` lacks, once after each update."""
        wrapper = self.engine_wrapper
        if wrapper is not None and self._logs_metrics and self.is_main_process:
            own = wrapper.take_metrics()
            values = {**values, **{name: value for name, value in own.items() if name not in values}}
        super().log(values, step=step, log_kwargs=log_kwargs or {})

    @override
    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> Any:
        """Return the norm of the pending window's divided gradient, and clip it. Collective.

        Of all parameters by their 2-norm the next step clips; of others the gradient is clipped at once, for which
        every rank holds the whole gradient for a moment. Accelerate's version returns DeepSpeed's norm of the step
        before.

        Args:
            parameters: all of the model's, or some.
            max_norm: the configured clipping, or any norm where none is configured, or for some parameters; infinity
                only asks for the norm.
            norm_type: as in PyTorch.

        Returns:
            A scalar tensor, the same on all ranks; 0 without a window.

        Raises:
            ValueError: a ``max_norm`` that contradicts the configured clipping.
            NotImplementedError: of some parameters or by another norm, at stage 3.
            RuntimeError: inside ``no_sync`` or inside a request.
        """
        wrapper = self.engine_wrapper
        if wrapper is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        return wrapper.clipping.of_parameters("accelerator.clip_grad_norm_", parameters, max_norm, norm_type)

    @override
    def clip_grad_value_(self, parameters: torch.Tensor | Iterable[torch.Tensor], clip_value: float) -> None:
        """Clip the values of the pending window's divided gradient. Collective. Accelerate's version refuses to.

        Args:
            parameters: all of the model's, or some.
            clip_value: as in PyTorch.

        Raises:
            NotImplementedError: at stage 3, where no rank has whole gradients.
            RuntimeError: inside ``no_sync`` or inside a request.
        """
        wrapper = self.engine_wrapper
        if wrapper is None:
            super().clip_grad_value_(parameters, clip_value)
            return
        with wrapper.clipping.whole_gradients("accelerator.clip_grad_value_"):
            torch.nn.utils.clip_grad_value_(parameters, clip_value)
