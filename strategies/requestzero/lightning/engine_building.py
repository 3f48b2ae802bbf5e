"""Construction of the engine: processes, device, the final config, and engines for training and evaluation.

Written for Lightning 2.6.6, whose ``DeepSpeedStrategy`` does this for CUDA only, and leaves some of the config and of
the Trainer's options out.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import lightning.pytorch as pl
from lightning.fabric.utilities.seed import reset_seed
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.strategies.deepspeed import remove_module_hooks
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from requestzero.config.nested import Config
from requestzero.config.options import RequestZeROSettings
from requestzero.config.own_keys import without_own_keys
from requestzero.lightning import checks
from requestzero.lightning.callback_checks import check_callbacks, let_in
from requestzero.lightning.checkpoint_plugins import check_before_fit
from requestzero.lightning.compiled_modules import let_compiled_modules_in
from requestzero.lightning.config import check_retained, config_without_optimizer, with_clipping, with_precision
from requestzero.lightning.deepspeed_device import use_deepspeed_device
from requestzero.lightning.optimizer import WindowLightningOptimizer
from requestzero.lightning.user_hooks import clips_by_itself, tell_where_gradients_are
from requestzero.zero.process_group import without_inference_operator

if TYPE_CHECKING:
    from requestzero.zero.engine import RequestZeROEngine


class EngineBuildingStrategy(DeepSpeedStrategy):
    """``DeepSpeedStrategy`` that builds the request-safe engine, on the device that the Trainer has chosen.

    It knows nothing of the running window. The derived class sets :attr:`config` and :attr:`settings` in its
    constructor.
    """

    config: Config
    """The DeepSpeed config, with our own keys."""
    settings: RequestZeROSettings
    """The options as the arguments and the user's config together have decided them."""
    _added_by_setup: frozenset[str] = frozenset()
    """Keys that the current fit or evaluation has added to the config."""

    @property
    def engine(self) -> RequestZeROEngine | None:
        """The engine of the last ``Trainer.fit``, ``None`` before the first.

        It stays after the fit; a later fit builds a new one, and an evaluation puts an engine without an optimizer
        in its place, so that this is ``None`` again.
        """
        from requestzero.zero.engine import RequestZeROEngine

        return self.model if isinstance(self.model, RequestZeROEngine) else None

    @override
    def _load_config(self, config: Any) -> None:
        """Read nothing: Lightning takes a config instead of the arguments, and here both are merged afterwards."""
        return None

    @override
    def _configure_launcher(self) -> None:
        """Also check the Trainer: this is called last in its construction, before any process has started."""
        checks.check_device(self.root_device)
        precision = str(self.precision_plugin.precision)
        self.config = with_precision(self.config, self.settings.overflow, precision)
        check_retained(self.settings, precision)
        checks.check_precision(precision, self.root_device)
        let_compiled_modules_in(EngineBuildingStrategy)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        """Skip Lightning's version, which refuses every accelerator but CUDA, and call DDP's, above it.

        Also let callbacks in that would refuse the class, before their own ``setup``, and check what the checkpoints
        of a fit would leave out.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        check_callbacks(callbacks, self.settings.stage)
        let_in(callbacks)
        use_deepspeed_device(self.root_device)
        DDPStrategy.setup_environment(self)
        if trainer.state.fn == TrainerFn.FITTING:
            check_before_fit(self._checkpoint_io, trainer.checkpoint_callbacks)

    @override
    def setup_distributed(self) -> None:
        """Skip, on the CPU, a comparison of device indices with ranks: CPU devices have no index."""
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @override
    def _init_deepspeed_distributed(self) -> None:
        """Keep DeepSpeed from compiling its inference operators, which training does not use."""
        with without_inference_operator():
            super()._init_deepspeed_distributed()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Also apply ``Trainer(sync_batchnorm=True)`` before a fit, as DDP does, and format the config anew.

        The Trainer's options or its loader may have changed since the last run.
        """
        if trainer.state.fn == TrainerFn.FITTING and self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.apply(self.model)
        self._config_initialized = False
        super().setup(trainer)

    @override
    def _format_config(self) -> None:
        """Also take the Trainer's clipping into the config, and leave the window's division to the step.

        What this adds is taken out when the next fit or evaluation begins, which may add something else.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        checks.check_clipping(trainer)
        own = {key: value for key, value in self.config.items() if key not in self._added_by_setup}
        self.config = with_clipping(own, None if clips_by_itself(trainer) else trainer.gradient_clip_val)
        super()._format_config()
        self.config["gradient_accumulation_steps"] = 1
        self._added_by_setup = frozenset(self.config.keys() - own.keys())

    @override
    def _auto_select_batch_size(self) -> int:
        """Return the sequences in a batch, for DeepSpeed's throughput log; 1 where only a hook of the module knows.

        Lightning's version calls the module's ``train_dataloader()`` once more than DDP does, and fails on
        ``DataLoader(batch_size=None)``.
        """
        assert self.lightning_module is not None
        source = self.lightning_module.trainer.fit_loop._data_source
        loader = None if source.is_module() else source.instance
        return getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 1

    @override
    def init_deepspeed(self) -> None:
        """Skip Lightning's warning that ``configure_gradient_clipping`` does nothing, which is not so here."""
        assert self.lightning_module is not None
        assert isinstance(self.model, pl.LightningModule)
        if self.lightning_module.trainer.training:
            tell_where_gradients_are(self.lightning_module.trainer, self.settings.stage)
            self._initialize_deepspeed_train(self.model)
        else:
            self._initialize_deepspeed_inference(self.model)

    @override
    def _initialize_deepspeed_train(self, model: Module) -> None:
        """Refuse two optimizers, where Lightning's version only mentions that the config's replaces the module's."""
        assert self.lightning_module is not None
        if "optimizer" in self.config:
            checks.check_config_optimizer(self.lightning_module.trainer)
        super()._initialize_deepspeed_train(model)

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        """Also refuse an optimizer that ZeRO cannot run, and say what to write in the place of several."""
        try:
            optimizer, scheduler = super()._init_optimizers()
        except MisconfigurationException as error:
            checks.explain_several_optimizers(error)
            raise
        checks.check_optimizer(optimizer, scheduler, self.config)
        return optimizer, scheduler

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        """Unchanged; a property is overridden as a whole."""
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Also wrap them so that manual optimization reaches the optimizer itself."""
        self._optimizers = optimizers
        self._lightning_optimizers = [
            WindowLightningOptimizer._to_lightning_optimizer(optimizer, self) for optimizer in optimizers
        ]

    def _device_arguments(self) -> argparse.Namespace:
        """Return DeepSpeed's "command-line arguments", the device's index. CPU devices have none: the rank is used."""
        on_cpu = self.root_device.type == "cpu"
        return argparse.Namespace(device_rank=self.local_rank if on_cpu else self.root_device.index)

    @override
    def _setup_model_and_optimizer(
        self,
        model: Module,
        optimizer: Optimizer | None,
        lr_scheduler: LRScheduler | ReduceLROnPlateau | None = None,
    ) -> tuple[Any, Optimizer]:
        """Build the request-safe engine, where Lightning's version calls ``deepspeed.initialize``."""
        from requestzero.zero.initialization import initialize

        engine, zero_optimizer, _, _ = initialize(
            args=self._device_arguments(),
            config=copy.deepcopy(self.config),
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, cast(Optimizer, zero_optimizer)

    @override
    def _initialize_deepspeed_inference(self, model: Module) -> None:
        """Build a stock engine without an optimizer. Lightning's version has no device rank on the CPU."""
        import deepspeed

        remove_module_hooks(model)
        self.model, _, _, _ = deepspeed.initialize(
            args=self._device_arguments(),
            config=config_without_optimizer(self.config),
            model=model,
            model_parameters=[],
            dist_init_required=False,
        )

    @override
    def _set_deepspeed_activation_checkpointing(self) -> None:
        """Also pass on ``number_checkpoints`` and ``synchronize_checkpoint_boundary``, which Lightning drops."""
        import deepspeed

        section = self.config.get("activation_checkpointing") or {}
        deepspeed.checkpointing.configure(
            mpu_=None,
            partition_activations=section.get("partition_activations"),
            contiguous_checkpointing=section.get("contiguous_memory_optimization"),
            num_checkpoints=section.get("number_checkpoints"),
            checkpoint_in_cpu=section.get("cpu_checkpointing"),
            synchronize=section.get("synchronize_checkpoint_boundary"),
            profile=section.get("profile"),
        )

    @contextmanager
    @override
    def model_sharded_context(self) -> Generator[None, None, None]:
        """Shard the parameters of a module as it is built (stage 3), by a config that is without our own keys."""
        if not self.zero_stage_3:
            yield
            return
        from deepspeed.runtime.zero.partition_parameters import Init

        self._init_config_if_needed()
        with Init(config_dict_or_path=without_own_keys(self.config)):
            yield
