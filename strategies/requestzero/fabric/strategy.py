"""The strategy for Lightning Fabric: what users build, and Fabric's methods that it overrides.

Written for Lightning 2.6.6, whose ``DeepSpeedStrategy`` for Fabric runs on CUDA only.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.fabric.strategies.registry import _StrategyRegistry
from lightning.fabric.utilities.rank_zero import rank_zero_warn
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from torch.nn import Module
from torch.optim import Optimizer
from typing_extensions import override

from requestzero.config.nested import Config
from requestzero.config.options import OverflowSettings
from requestzero.config.own_keys import without_own_keys
from requestzero.environment.versions import require_supported_deepspeed
from requestzero.fabric.boundaries import RequestBoundaries
from requestzero.fabric.optimizer import FabricWindowOptimizer
from requestzero.lightning import checks
from requestzero.lightning.checkpoint_plugins import check_folder_plugin, warn_of_background
from requestzero.lightning.config import (
    check_retained,
    config_without_optimizer,
    merge_arguments,
    with_clipping,
    with_precision,
)
from requestzero.lightning.deepspeed_device import use_deepspeed_device
from requestzero.lightning.given import NotesArguments, given_names
from requestzero.lightning.options import check_options
from requestzero.lightning.registered_names import register_names
from requestzero.lightning.strategy_facts import FABRIC
from requestzero.zero.clipping import LoopClipping
from requestzero.zero.process_group import without_inference_operator
from requestzero.zero.window_checkpoint.replacing import appearing

if TYPE_CHECKING:
    from requestzero.zero.engine import RequestZeROEngine
    from requestzero.zero.engine.torch_clipping import Clipping


class RequestZeROFabric(DeepSpeedStrategy, NotesArguments):
    """ZeRO 1, 2 or 3 in which every optimizer step applies exactly the sum of its window's requests.

    The loop is one for DDP. Every backward is a request of one micro-batch, or one micro-batch of a longer request in
    ``fabric.no_backward_sync``; ``optimizer.step()`` applies all backwards since the last step, and
    ``optimizer.zero_grad()`` before it discards them. ``RequestZeROFabric.engine_of(model)`` is the engine, for all
    else: names of requests, weights of micro-batches, counts.

    As under DDP, the step divides by nothing but the number of ranks unless ``normalization`` says so: a loop that
    accumulates divides its losses itself, or does not.

    Args:
        stage: See :class:`~requestzero.config.options.RequestZeROSettings` for this and the options up to
            ``overflow``.
        offload_optimizer: Master weights and optimizer step on the CPU.
        offload_parameters: Stage 3: this rank's part of the weights on the CPU while nothing needs it.
        retain_gpu_grad_partition_until_step: Keep the device's gradient partition between requests.
        grad_accum_dtype: dtype of the window's running sum.
        normalization: What the window's sum is divided by: ``"sum"`` (nothing), ``"mean"`` or ``"token"``; see
            ``engine.step``.
        overflow: :class:`~requestzero.config.options.OverflowSettings` or a mapping of its fields.
        config: Further DeepSpeed keys: a mapping, or the path of a JSON or YAML file. Merged with the arguments.
        reduce_gradients_at: When gradients are summed over the ranks.
        rank_agreement: Whether ranks agree on every request.
        rank_dependent_micro_batches: Whether ranks may run different numbers of micro-batches in a window.
        rank_dependent_parameters: Whether parameters may take part on some ranks only.
        compare_weights: Whether weights that were written through ``param.data`` count.
        abort: Whether any request can be aborted (``with RequestZeROFabric.engine_of(model).request(name):``).
        **deepspeed_options: Those of Fabric's ``DeepSpeedStrategy`` that mean something here.

    Raises:
        ImportError: the installed DeepSpeed is not supported.
        TypeError: an unknown option.
        ValueError: a value that is not allowed, an option that does not apply, or one that was given twice with
            different values.
        FileNotFoundError: ``config`` names a file that does not exist.
    """

    config: Config
    """The DeepSpeed config, with our own keys."""

    def __init__(
        self,
        stage: int = 2,
        offload_optimizer: bool = False,
        offload_parameters: bool = False,
        retain_gpu_grad_partition_until_step: bool | str = False,
        grad_accum_dtype: str | None = None,
        normalization: str = "sum",
        overflow: OverflowSettings | Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        reduce_gradients_at: str | None = None,
        rank_agreement: bool = True,
        rank_dependent_micro_batches: bool = False,
        rank_dependent_parameters: bool = False,
        compare_weights: bool = True,
        abort: bool = False,
        **deepspeed_options: Any,
    ) -> None:
        require_supported_deepspeed()
        check_options(deepspeed_options, FABRIC)
        own: dict[str, Any] = {
            "stage": stage,
            "offload_optimizer": offload_optimizer,
            "offload_parameters": offload_parameters,
            "retain_gpu_grad_partition_until_step": retain_gpu_grad_partition_until_step,
            "grad_accum_dtype": grad_accum_dtype,
            "normalization": normalization,
            "overflow": overflow,
            "reduce_gradients_at": reduce_gradients_at,
            "rank_agreement": rank_agreement,
            "rank_dependent_micro_batches": rank_dependent_micro_batches,
            "rank_dependent_parameters": rank_dependent_parameters,
            "compare_weights": compare_weights,
            "abort": abort,
        }
        init, args, kwargs = self._call
        del self._call
        if init is not RequestZeROFabric.__init__:  # that of a derived class, which may pass on whatever it wants
            init, args, kwargs = RequestZeROFabric.__init__, (), {**own, "config": config, **deepspeed_options}
        given = given_names(init, args, kwargs, FABRIC)
        merged, self.settings = merge_arguments(own, deepspeed_options, given, config, FABRIC)
        super().__init__(stage=stage, config=None, **deepspeed_options)
        self.config = merged
        self._backward_sync_control = RequestBoundaries()
        self._engines: list[RequestZeROEngine] = []

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register our own names, and not Lightning's. Doing it again changes nothing."""
        register_names(strategy_registry, cls, "request_zero")

    @staticmethod
    def engine_of(model: Module) -> RequestZeROEngine:
        """Return the engine of a model that ``fabric.setup`` has returned together with its optimizer.

        Raises:
            TypeError: something else.
        """
        from requestzero.zero.engine import RequestZeROEngine

        for module in model.modules():
            if isinstance(module, RequestZeROEngine):
                return module
        raise TypeError(
            f"engine_of() got a {type(model).__name__} without a request-safe engine: give the model that "
            "fabric.setup(model, optimizer) has returned with this strategy."
        )

    @staticmethod
    def gradients(model: Module) -> AbstractContextManager[None]:
        """Let ``p.grad`` be the open window's gradient in a block, and let its changes count. Collective.

        Between the window's last backward and ``optimizer.step()``, at stages 1 and 2. The gradient is summed over the
        window, averaged over ranks and divided as the step divides it; each rank holds all of it in the block. The open
        request ends.

        Example::

            with RequestZeROFabric.gradients(model):
                for parameter in model.parameters():
                    parameter.grad.mul_(0.5)
            optimizer.step()

        Args:
            model: as ``fabric.setup`` has returned it together with its optimizer.

        Returns:
            The block.

        Raises:
            TypeError: something else.
            NotImplementedError: at stage 3, where no rank has whole gradients.
        """
        return _clipping_of(model).whole_gradients("RequestZeROFabric.gradients()")

    def __repr__(self) -> str:
        """Say where it belongs: Trainers show this in their error."""
        return (
            f"<RequestZeROFabric(stage={self.settings.stage}), for lightning.fabric.Fabric, not for a Trainer, for "
            "which there is requestzero.RequestZeRO>"
        )

    # --- processes, device, config ----------------------------------------------------------------------------------

    @override
    def _load_config(self, config: Any) -> None:
        """Read nothing: Fabric takes a config instead of the arguments, and here both are merged afterwards."""
        return None

    @override
    def setup_environment(self) -> None:
        """Skip Fabric's version, which refuses every accelerator but CUDA, and call DDP's, above it.

        Raises:
            ValueError: another device, or a ``CheckpointIO`` plugin that would be left out.
        """
        checks.check_device(self.root_device, FABRIC.owner)
        check_folder_plugin(self._checkpoint_io, FABRIC)
        use_deepspeed_device(self.root_device)
        DDPStrategy.setup_environment(self)
        warn_of_background(self._checkpoint_io, FABRIC)

    @override
    def _setup_distributed(self) -> None:
        """Skip, on the CPU, a comparison of device indices with ranks: CPU devices have no index."""
        if self.root_device.type != "cpu":
            super()._setup_distributed()
            return
        reset_seed()
        self._set_world_ranks()
        self._init_deepspeed_distributed()
        self._format_config()
        self._config_initialized = True

    @override
    def _init_deepspeed_distributed(self) -> None:
        """Keep DeepSpeed from compiling its inference operators, which training does not use."""
        with without_inference_operator():
            super()._init_deepspeed_distributed()

    @override
    def _format_config(self) -> None:
        """Also check the precision, and leave accumulation and clipping to the loop."""
        precision = self.precision.precision
        checks.check_precision(precision, self.root_device, FABRIC.owner)
        check_retained(self.settings, precision, FABRIC.owner)
        config = with_precision(self.config, self.settings.overflow, precision, FABRIC.owner)
        self.config = with_clipping(config, None)
        super()._format_config()
        self.config["gradient_accumulation_steps"] = 1

    @override
    def module_sharded_context(self) -> AbstractContextManager:
        """Shard the parameters of a module as it is built (stage 3), by a config that is without our own keys."""
        if not self.zero_stage_3:
            return nullcontext()
        from deepspeed.runtime.zero.partition_parameters import Init

        return Init(config_dict_or_path=without_own_keys(self.config))

    # --- engines ----------------------------------------------------------------------------------------------------

    @property
    @override
    def model(self) -> Any:
        """The only engine, ``None`` where there are several: Fabric would step the one of the last backward."""
        return self._deepspeed_engine if len(self._engines) <= 1 else None

    @override
    def setup_module_and_optimizers(
        self, module: Module, optimizers: list[Optimizer], scheduler: Any = None
    ) -> tuple[Any, list[Optimizer], Any]:
        """Also give the loop an optimizer whose ``step`` and ``zero_grad`` are those of the engine's windows."""
        engine: Any
        engine, _, _ = super().setup_module_and_optimizers(module, optimizers)  # the engine would step the scheduler
        self._engines.append(engine)
        engine.loop_clipping = self._make_clipping(engine)
        return engine, [FabricWindowOptimizer(engine, self._step)], scheduler

    @override
    def _initialize_engine(self, model: Module, optimizer: Optimizer | None = None, scheduler: Any = None) -> Any:
        """Build the request-safe engine, or without an optimizer a stock one."""
        arguments = argparse.Namespace(device_rank=self.root_device.index or 0)
        if optimizer is None:
            import deepspeed

            engine, _, _, _ = deepspeed.initialize(
                args=arguments, config=config_without_optimizer(self.config), model=model, dist_init_required=False
            )
            return engine, None, None
        from requestzero.zero.initialization import initialize

        engine, zero_optimizer, _, scheduler = initialize(
            args=arguments,
            config=copy.deepcopy(self.config),
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=scheduler,
            dist_init_required=False,
        )
        return engine, zero_optimizer, scheduler

    # --- the loop ---------------------------------------------------------------------------------------------------

    @override
    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        """Apply the window of the optimizer's engine, divided as ``normalization`` says. Collective."""
        if isinstance(optimizer, FabricWindowOptimizer):
            return optimizer.step(**kwargs)
        return FabricWindowOptimizer(optimizer, self._step).step(**kwargs)

    def _step(self, engine: RequestZeROEngine) -> None:
        engine.step(normalization=self.settings.normalization)

    def _make_clipping(self, engine: RequestZeROEngine) -> LoopClipping:
        def prepare_step(call: str) -> dict[str, str]:
            engine.end_request()
            return {"normalization": self.settings.normalization}

        return LoopClipping(engine, prepare_step, float(engine.optimizer.clip_grad) or None)

    @override
    def clip_gradients_norm(
        self,
        module: Any,
        optimizer: Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Return the norm of the window's gradient as the step divides it, and let that step clip. Collective.

        By another norm than the 2-norm the gradient is clipped at once, for which every rank holds the whole gradient
        for a moment. The open request ends.

        Raises:
            ValueError: ``max_norm`` is not positive.
            NotImplementedError: another norm than the 2-norm, at stage 3.
            RuntimeError: the norm is not finite, and ``error_if_nonfinite``; on all ranks.
        """
        parameters = self.engine_of(module).module.parameters()
        return _clipping_of(module).of_parameters("clip_gradients", parameters, max_norm, norm_type, error_if_nonfinite)

    @override
    def clip_gradients_value(self, module: Any, optimizer: Optimizer, clip_val: float | int) -> None:
        """Clip the values of the window's gradient as the step divides it. Collective; the open request ends.

        Raises:
            NotImplementedError: at stage 3, where no rank has whole gradients.
        """
        with _clipping_of(module).whole_gradients("clip_gradients(clip_val=...)"):
            torch.nn.utils.clip_grad_value_(self.engine_of(module).module.parameters(), clip_val)

    # --- collectives of Fabric's --------------------------------------------------------------------------------------

    @override
    def save_checkpoint(
        self,
        path: _PATH,
        state: dict[str, Any],
        storage_options: Any | None = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save a folder of DeepSpeed's, with the optimizer's state as part of the model's. Collective.

        An open update window is saved too, between requests. The folder appears as a whole.

        Raises:
            ValueError: ``state`` has the key ``"lr_scheduler"``, which Fabric would not load again.
            RuntimeError: inside a request.
            RankDisagreementError: another rank does something else.
        """
        if "lr_scheduler" in state:
            raise ValueError(
                "fabric.save() got a state with the key 'lr_scheduler', under which DeepSpeed keeps a scheduler of its "
                "own and which fabric.load() leaves out: give yours another name, such as 'scheduler'."
            )
        self._agree("fabric.save")
        items = {key: value for key, value in state.items() if not isinstance(value, FabricWindowOptimizer)}
        with appearing(Path(self.broadcast(path)), self.is_global_zero) as folder:
            super().save_checkpoint(folder, items, storage_options, filter)
            self._agree("the end of fabric.save")

    @override
    def load_checkpoint(
        self, path: _PATH, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a folder of DeepSpeed's, and go on with the update window that was open in it. Collective.

        A window that another number of ranks has begun is discarded with a warning where ``normalization`` is
        ``"mean"``: there is no mean over the micro-batches of a rank in it.

        Raises:
            RankDisagreementError: another rank does something else.
        """
        self._agree("fabric.load")
        loaded = super().load_checkpoint(path, state, strict, weights_only)
        for engine in self._engines:
            if engine.update_window.shared_out and self.settings.normalization == "mean":
                rank_zero_warn(
                    "RequestZeROFabric discards the open update window of the checkpoint: another number of ranks has "
                    "begun it, so that there is no mean over the micro-batches of a rank (normalization='token' and "
                    "'sum' go on in it)."
                )
                engine.zero_grad()
        return loaded

    @override
    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Also agree to it, so that a rank alone in it is an error."""
        self._agree("a barrier")
        super().barrier(*args, **kwargs)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Also agree to it, so that a rank alone in it is an error."""
        self._agree("a broadcast")
        return super().broadcast(obj, src)

    def _agree(self, name: str) -> None:
        for engine in self._engines[:1]:
            engine.agreement.before_collective(name)


def _clipping_of(model: Module) -> Clipping:
    clipping = RequestZeROFabric.engine_of(model).loop_clipping
    assert clipping is not None  # since ``fabric.setup``
    return clipping
