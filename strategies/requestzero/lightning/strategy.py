"""The Lightning strategy."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.utilities.seed import reset_seed
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from lightning.pytorch.strategies.deepspeed import remove_module_hooks
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from typing_extensions import override

from requestzero.config.settings import OverflowSettings, RequestZeROSettings
from requestzero.data.boundaries import WindowMarks, unwrap
from requestzero.data.micro_batch import MicroBatch
from requestzero.data.weight import check_weight
from requestzero.environment.versions import require_supported_deepspeed
from requestzero.lightning import checks, rng
from requestzero.lightning import config as configs
from requestzero.lightning.checkpoint_gate import CheckpointGate
from requestzero.lightning.deepspeed_device import use_deepspeed_device
from requestzero.lightning.given import NotesArguments, given_names
from requestzero.lightning.loops import take_over_loops
from requestzero.lightning.optimizer import WindowLightningOptimizer
from requestzero.lightning.options import check_options, merge_loss_scale
from requestzero.lightning.precision import RequestZeROPrecision
from requestzero.zero.metrics import logged_metrics
from requestzero.zero.process_group import without_inference_operator

if TYPE_CHECKING:
    from requestzero.zero.engine import RequestZeROEngine
    from requestzero.zero.partition_traffic import PartitionTraffic


# Where a checkpoint keeps the random states of the ranks.
_RANDOM_STATES = "requestzero_random_states"

# Of the engine, and kept when it goes.
_COUNTERS = (
    "attempted_updates",
    "applied_updates",
    "skipped_updates",
    "consecutive_skips",
    "dropped_requests",
    "empty_updates",
)


class RequestZeRO(DeepSpeedStrategy, NotesArguments):
    """ZeRO 1 or 2 in which every optimizer step applies exactly the sum of its window's requests.

    A *request* is one or more micro-batches, an *update window* all requests between two optimizer steps. Every batch
    is a request of one micro-batch and ``Trainer(accumulate_grad_batches=N)`` makes N requests an update, unless the
    loader yields :class:`~requestzero.MicroBatch`, which says where requests (and windows) end. The model, its hooks
    and callbacks see the ``inputs`` only.

    Who counts what:

    - ``trainer.global_step``, ``max_steps``, ``log_every_n_steps``, ``ModelCheckpoint(every_n_train_steps=...)`` and
      the hooks around the optimizer count *attempted* updates: one per window. :attr:`applied_updates` leaves out
      those skipped for gradients that are not finite (:attr:`skipped_updates`); so do schedulers with
      ``interval="step"``. A window in which every ``training_step`` returned ``None`` has nothing to apply or skip:
      ``global_step`` counts it, neither of the two others does.
    - ``batch_idx``, ``limit_train_batches``, ``val_check_interval`` and a scheduler's ``frequency`` count batches
      (micro-batches), as in Lightning. A validation or periodic checkpoint that falls inside a window waits for its
      end.
    - ``trainer.estimated_stepping_batches`` is batches divided by ``accumulate_grad_batches``, so it is wrong for
      loaders whose requests have several micro-batches, or which mark windows themselves.

    The loss is not divided by ``accumulate_grad_batches``: the window's sum is divided once, by the step, after which
    clipping and :attr:`grad_norm` apply. ``outputs["loss"]`` in hooks is the loss that ``training_step`` returned.

    In manual optimization each batch is one request too, whatever its number of backwards; ``opt.step()`` applies the
    window, divided as ``normalization`` says (so do not divide the loss, or use ``"sum"``), and ``opt.zero_grad()``
    discards it (after a step there is nothing to discard). See also :meth:`end_request`, :meth:`add_weight` and
    :attr:`window_end`. A
    window that is left open at an epoch's end is discarded with a warning, before the epoch's last validation, as is
    one that is left early (``trainer.should_stop``, ``on_train_batch_start`` returning -1).

    Checkpoints hold no pending gradients: ``trainer.save_checkpoint`` raises RuntimeError while :attr:`window_open`.

    Args:
        stage: See :class:`~requestzero.config.settings.RequestZeROSettings` for this and the options up to
            ``overflow``.
        offload_optimizer: Master weights and optimizer step on the CPU.
        retain_gpu_grad_partition_until_step: True trades device memory between requests for copies, ``"auto"`` while
            there is enough of it; needs offload, and fp32 accumulation on a 16-bit model.
        grad_accum_dtype: dtype of the window's running sum.
        normalization: What the window's sum is divided by. With ``"token"`` the loss is a sum, and the loader's
            ``MicroBatch(weight=...)`` or :meth:`add_weight` says of how many tokens.
        overflow: :class:`~requestzero.config.settings.OverflowSettings` or a mapping of its fields.
        config: Further DeepSpeed keys: a mapping (a dict, an OmegaConf object), or the path of a JSON or YAML file.
            Merged with the arguments; only an argument that is not given gives way to it. (Where all arguments are
            given, as LightningCLI does, one that has its default's value counts as not given.)
        incomplete_window: What happens to an epoch's last, shorter window (automatic optimization).
        log_metrics: Whether the Trainer's loggers get :attr:`logged_metrics` with every update that they log.
        rank_agreement: Whether ranks agree on every request, so that those that do not do the same raise the same
            :class:`~requestzero.errors.RankDisagreementError`: a rank that runs out of data, one whose loader,
            ``training_step`` or callback raises, or whose ``training_step`` returns ``None`` while others' do not.
        rank_dependent_parameters: Whether parameters may take part on some ranks only.
        **deepspeed_options: Those of Lightning's ``DeepSpeedStrategy`` that mean something under ZeRO 1 and 2. Its
            loss-scale options are another way to write those of ``overflow``.

    Raises:
        ImportError: the installed DeepSpeed is not supported.
        TypeError: an unknown option.
        ValueError: a value that is not allowed, an option that does not apply, or one that was given twice with
            different values. What depends on the Trainer (precision, clipping) is checked when that is known, before
            training starts.
        FileNotFoundError: ``config`` names a file that does not exist.
    """

    strategy_name = "request_zero"

    def __init__(
        self,
        stage: int = 2,
        offload_optimizer: bool = False,
        retain_gpu_grad_partition_until_step: bool | str = False,
        grad_accum_dtype: str | None = None,
        normalization: str = "mean",
        overflow: OverflowSettings | Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | str | Path | None = None,
        *,
        incomplete_window: str = "step",
        log_metrics: bool = True,
        rank_agreement: bool = True,
        rank_dependent_parameters: bool = False,
        **deepspeed_options: Any,
    ) -> None:
        require_supported_deepspeed()
        check_options(deepspeed_options)
        own: dict[str, Any] = {
            "stage": stage,
            "offload_optimizer": offload_optimizer,
            "retain_gpu_grad_partition_until_step": retain_gpu_grad_partition_until_step,
            "grad_accum_dtype": grad_accum_dtype,
            "normalization": normalization,
            "overflow": overflow,
            "incomplete_window": incomplete_window,
            "log_metrics": log_metrics,
            "rank_agreement": rank_agreement,
            "rank_dependent_parameters": rank_dependent_parameters,
        }
        init, args, kwargs = self._call
        del self._call
        if init is not RequestZeRO.__init__:  # that of a derived class, which may pass on whatever it wants
            init, args, kwargs = RequestZeRO.__init__, (), {**own, "config": config, **deepspeed_options}
        given = given_names(init, args, kwargs)
        own["overflow"] = merge_loss_scale(OverflowSettings.build(overflow), deepspeed_options, given)
        settings = RequestZeROSettings(**own)
        merged_config, self.settings = configs.merge_arguments(settings, deepspeed_options, given, config)
        self.marks = _marks()
        self._update_applied: bool | None = None
        self._discarded = False  # by us, since the current batch was taken
        self._failed = False
        self._data_ended = False  # the other ranks know
        self._told_division = False
        self._weight: Any = None  # of the current batch, until its backward
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._traffic: PartitionTraffic | None = None
        self._logged: dict[str, torch.Tensor] = {}
        self._random_state: rng.RandomState | None = None
        self._gate: CheckpointGate | None = None
        self._added_by_setup: frozenset[str] = frozenset()
        super().__init__(
            stage=stage, offload_optimizer=self.settings.offload_optimizer, config=None, **deepspeed_options
        )
        self.config = merged_config

    @override
    def _load_config(self, config: Any) -> None:
        """Lightning's version takes a config instead of the arguments; here both are merged afterwards."""
        return None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        for stage in (1, 2):
            for offload in (False, True):
                strategy_registry.register(
                    f"{cls.strategy_name}_{stage}" + "_offload" * offload,
                    cls,
                    description=f"Request-safe DeepSpeed ZeRO {stage}" + " with the optimizer on the CPU" * offload,
                    override=True,
                    stage=stage,
                    offload_optimizer=offload,
                )

    # --- what users read and call ---------------------------------------------------------------------------

    @property
    def engine(self) -> RequestZeROEngine | None:
        """The engine of the last ``Trainer.fit``, ``None`` before the first.

        It stays after the fit; a later fit builds a new one, and an evaluation puts an engine without an optimizer
        in its place, so that this is ``None`` again.
        """
        from requestzero.zero.engine import RequestZeROEngine

        return self.model if isinstance(self.model, RequestZeROEngine) else None

    @property
    def window_open(self) -> bool:
        """Whether gradients are pending: a backward has run since the last step or discard."""
        return self.engine is not None and self.engine.update_window.is_open

    @property
    def window_end(self) -> bool:
        """Whether the current batch should end its update window, as the loader marks it.

        For manual optimization, where nothing steps by itself. Without marks every batch ends one.
        """
        return self.marks.window_end

    def _count(self, name: str) -> int:
        return self._counts[name] if self.engine is None else int(getattr(self.engine, name))

    @property
    def attempted_updates(self) -> int:
        """Update windows that were stepped, over the whole training, resumed parts included."""
        return self._count("attempted_updates")

    @property
    def applied_updates(self) -> int:
        """Updates that changed the weights, over the whole training."""
        return self._count("applied_updates")

    @property
    def skipped_updates(self) -> int:
        """Updates that were skipped for gradients that are not finite, over the whole training."""
        return self._count("skipped_updates")

    @property
    def consecutive_skips(self) -> int:
        """Updates that were skipped since the last one that was applied."""
        return self._count("consecutive_skips")

    @property
    def dropped_requests(self) -> int:
        """Requests that were left out of their updates (``on_overflow="drop_request"``), over the whole training."""
        return self._count("dropped_requests")

    @property
    def empty_updates(self) -> int:
        """Windows that were left out because their total weight was zero, over the whole training."""
        return self._count("empty_updates")

    @property
    def partition_traffic(self) -> PartitionTraffic | None:
        """Copies between this rank's gradient partitions and host gradients; ``None`` before there is an engine."""
        return self._traffic if self.engine is None else self.engine.partition_traffic

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        """What the loggers get of the last update: scalars, see :func:`requestzero.zero.metrics.logged_metrics`.

        Empty before the first update, and with ``log_metrics=False``.
        """
        return self._logged

    @property
    def batch_weight(self) -> Any:
        """``weight`` of the current batch's ``MicroBatch``, ``None`` where the loader gives none."""
        return self.marks.weight

    @property
    def update_applied(self) -> bool:
        """Whether the current batch has ended with an update that changed the weights."""
        return bool(self._update_applied)

    @property
    def grad_norm(self) -> float | None:
        """2-norm of the last update's divided gradient over all ranks, before clipping; ``None`` before one.

        Infinite if it was skipped. The loggers get it by themselves, see ``log_metrics``.
        """
        norm = None if self.engine is None else self.engine.get_global_grad_norm()
        return None if norm is None else float(norm)

    def end_request(self) -> None:
        """End the open request now: for manual optimization with several requests in a batch. Collective."""
        if self.engine is not None:
            self.engine.end_request()

    def add_weight(self, weight: float | torch.Tensor) -> None:
        """Report the weight of one backward, for ``normalization="token"``: once for each.

        In automatic optimization for batches without ``MicroBatch(weight=...)``, from ``training_step``. In manual
        optimization right before ``manual_backward``, where :attr:`batch_weight` is what the loader says.

        Args:
            weight: a finite number of at least 0, or a tensor that holds one, which is not read before the step.

        Raises:
            ValueError: not such a number, or the batch has a weight already (automatic optimization).
        """
        check_weight(weight)
        if not self._automatic:
            assert self.engine is not None
            self.engine.add_weight(weight)
            return
        if self._weight is not None:
            raise ValueError(
                f"add_weight({weight!r}) for a batch that has the weight {self._weight!r} already, from its MicroBatch "
                "or another call: give one."
            )
        self._weight = weight

    # --- construction: Trainer, processes, engine -----------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Lightning gives a plain ``DeepSpeedPrecision``; it is replaced by one that knows this strategy."""
        if precision_plugin is not None:
            precision_plugin = RequestZeROPrecision(checks.check_plugin(precision_plugin).precision, self)
        self._precision_plugin = precision_plugin

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        return super().optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        """Also wrap them so that manual optimization reaches the optimizer itself."""
        self._optimizers = optimizers
        self._lightning_optimizers = [
            WindowLightningOptimizer._to_lightning_optimizer(optimizer, self) for optimizer in optimizers
        ]

    @override
    def _configure_launcher(self) -> None:
        """Called last when a Trainer is built: everything but the model is known, no process has started."""
        checks.check_device(self.root_device)
        assert isinstance(self.precision_plugin, RequestZeROPrecision)
        assert self.config is not None
        precision = self.precision_plugin.precision
        self.config = configs.with_precision(self.config, self.settings.overflow, precision)
        configs.check_retained(self.settings, precision)
        checks.check_precision(precision, self.root_device)
        super()._configure_launcher()

    @override
    def setup_environment(self) -> None:
        """Lightning's version refuses every accelerator but CUDA; DDP's, above it, does not."""
        use_deepspeed_device(self.root_device)
        DDPStrategy.setup_environment(self)

    @override
    def setup_distributed(self) -> None:
        """Lightning's version compares device indices with ranks, and CPU devices have none."""
        if self.root_device.type != "cpu":
            super().setup_distributed()
            return
        reset_seed()
        self.set_world_ranks()
        self._init_deepspeed_distributed()

    @override
    def _init_deepspeed_distributed(self) -> None:
        """Without compiling what training does not use."""
        with without_inference_operator():
            super()._init_deepspeed_distributed()

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            checks.check_training_step(trainer.lightning_module)
            self.marks, self._update_applied, self._discarded = _marks(), None, False
            self._logged = {}
            self._failed = self._data_ended = False
            take_over_loops(trainer)
            self._apply_layer_sync()
            self._gate = CheckpointGate(trainer.checkpoint_callbacks, lambda: self.window_open)
        self._config_initialized = False  # the Trainer's options or its loader may have changed
        super().setup(trainer)

    def _apply_layer_sync(self) -> None:
        """``Trainer(sync_batchnorm=True)``: done as by DDP. Lightning's DeepSpeed strategy leaves it out."""
        if self._layer_sync is not None and self.model is not None:
            self.model = self._layer_sync.apply(self.model)

    @override
    def _format_config(self) -> None:
        """Also take the Trainer's clipping into the config, and leave the window's division to the step.

        What this adds is taken out when the next fit or evaluation begins, which may add something else.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        checks.check_clipping(trainer)
        assert self.config is not None
        own = {key: value for key, value in self.config.items() if key not in self._added_by_setup}
        self.config = configs.with_clipping(own, trainer.gradient_clip_val)
        super()._format_config()
        self.config["gradient_accumulation_steps"] = 1
        self._added_by_setup = frozenset(self.config.keys() - own.keys())

    @override
    def _auto_select_batch_size(self) -> int:
        """Sequences per batch, for DeepSpeed's throughput log only; 1 where only a hook could tell.

        Lightning's version calls the module's ``train_dataloader()`` once more than under DDP, and fails on
        ``DataLoader(batch_size=None)``.
        """
        assert self.lightning_module is not None
        source = self.lightning_module.trainer.fit_loop._data_source
        loader = None if source.is_module() else source.instance
        return getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 1

    @override
    def _initialize_deepspeed_train(self, model: Module) -> None:
        """Lightning's version only mentions that an optimizer in the config takes the module's place."""
        assert self.lightning_module is not None
        if "optimizer" in (self.config or {}):
            checks.check_config_optimizer(self.lightning_module.trainer)
        super()._initialize_deepspeed_train(model)

    @override
    def _init_optimizers(self) -> tuple[Optimizer, LRSchedulerConfig | None]:
        optimizer, scheduler = super()._init_optimizers()
        assert self.config is not None
        checks.check_optimizer(optimizer, scheduler, self.config)
        return optimizer, scheduler

    @override
    def _setup_model_and_optimizer(
        self,
        model: Module,
        optimizer: Optimizer | None,
        lr_scheduler: LRScheduler | ReduceLROnPlateau | None = None,
    ) -> tuple[Any, Optimizer]:
        """Lightning's version calls ``deepspeed.initialize``, with no device rank on the CPU."""
        from requestzero.zero.initialization import initialize

        engine, zero_optimizer, _, _ = initialize(
            args=self._deepspeed_args(),
            config=copy.deepcopy(self.config),
            model=model,
            model_parameters=[parameter for parameter in model.parameters() if parameter.requires_grad],
            optimizer=optimizer,
            lr_scheduler=lr_scheduler,
            dist_init_required=False,
        )
        return engine, zero_optimizer

    def _deepspeed_args(self) -> argparse.Namespace:
        on_cpu = self.root_device.type == "cpu"
        return argparse.Namespace(device_rank=self.local_rank if on_cpu else self.root_device.index)

    @override
    def _initialize_deepspeed_inference(self, model: Module) -> None:
        """A stock engine without an optimizer. Lightning's version has no device rank on the CPU."""
        import deepspeed

        assert self.config is not None
        remove_module_hooks(model)
        config: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1}
        config.update({name: self.config[name] for name in ("fp16", "bf16") if name in self.config})
        self.model, _, _, _ = deepspeed.initialize(
            args=self._deepspeed_args(),
            config=copy.deepcopy(config),
            model=model,
            model_parameters=[],
            dist_init_required=False,
        )

    @override
    def _set_deepspeed_activation_checkpointing(self) -> None:
        """Lightning's version leaves ``number_checkpoints`` and ``synchronize_checkpoint_boundary`` out."""
        import deepspeed

        section = (self.config or {}).get("activation_checkpointing") or {}
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
        """ZeRO 1 and 2 shard no parameters. Lightning's version has stage 3 read our config."""
        yield

    # --- training -------------------------------------------------------------------------------------------

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning then calls the optimizer and its hooks once per window, not per micro-batch."""
        return False

    @property
    def _automatic(self) -> bool:
        return self.lightning_module is None or self.lightning_module.automatic_optimization

    @property
    def window_complete(self) -> bool:
        """Whether a window ends with the current batch (automatic), or nothing is pending (manual)."""
        return self.marks.window_end if self._automatic else not (self.window_open or self._discarded)

    @property
    def holds_schedulers(self) -> bool:
        """Whether the current batch has made no update, so that schedulers have to wait.

        Not before a run's first batch: a resumed run makes up for what came after its checkpoint was saved.
        """
        return self._update_applied is False

    @property
    def steps_incomplete_windows(self) -> bool:
        """Whether an epoch's last batch ends the open window with a step."""
        return self._automatic and self.settings.incomplete_window == "step"

    def take_batch(self, batch: Any) -> Any:
        """What the model gets of a batch that the loop has fetched; in training, its marks are noted.

        Raises:
            ValueError: the loader's marks contradict each other or the Trainer.
        """
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return unwrap(batch)
        self._update_applied = self._discarded = self._data_ended = False
        if batch is None:
            self.marks.skip()
            self._weight = None
            return None
        if isinstance(batch, MicroBatch):
            checks.check_scheduler_frequency(self.lr_scheduler_configs)
        inputs = self.marks.take(batch, trainer.accumulate_grad_batches)
        self._weight = self.marks.weight
        self._announce()
        return inputs

    def _announce(self) -> None:
        """Tell the engine of a request at its first batch, so that ranks agree while the forward runs."""
        assert self.engine is not None
        if self.marks.starts_request and not self.engine.update_window.request_open:
            micro_batches = self.marks.micro_batches if self._automatic else None
            window_end = self.marks.window_ends_with_request if self._automatic else None
            self.engine.begin_request(self.marks.request_id, micro_batches=micro_batches, window_end=window_end)

    def end_data(self) -> None:
        """The epoch has no more batches for this rank. Collective; once per epoch."""
        if self.engine is not None and not self._data_ended:
            self._data_ended = True
            self.engine.end_data()

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks of an exception that ends the fit on this rank.

        Raises:
            RankDisagreementError: unless all ranks have failed alike.
        """
        if self.engine is not None and not self._failed:
            self._failed = True
            self.engine.fail(error)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Also tell the other ranks of what was raised outside the training loop."""
        if isinstance(exception, Exception):
            self.fail(exception)
        super().on_exception(exception)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Nothing to block: ZeRO 2 has to reduce in every backward, ZeRO 1 waits for the request's end."""
        yield

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Also tell the engine whether this backward is the request's last, and its weight.

        In manual optimization the former is known only when ``training_step`` has returned, the latter by
        :meth:`add_weight`.

        Raises:
            ValueError: ``normalization="token"``, and the batch has no weight.
        """
        assert self.engine is not None
        weight = self._take_weight() if self._automatic and self.settings.normalization == "token" else None
        self.engine.set_gradient_accumulation_boundary(self._automatic and self.marks.request_end)
        if weight is not None:
            self.engine.add_weight(weight)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def _take_weight(self) -> Any:
        """The current batch's weight, once: a later backward of it would need its own."""
        weight, self._weight = self._weight, None
        if weight is None:
            raise ValueError(
                f"A batch of request {self.marks.request_id!r} has no weight, by which normalization='token' divides: "
                "have the loader yield MicroBatch(inputs, weight=number of trained tokens), as RequestLoader does, or "
                "call self.trainer.strategy.add_weight(...) in training_step, and return the sum of the losses there."
            )
        return weight

    def apply_window(self, **kwargs: Any) -> None:
        """Step: apply the window's sum, divided as ``normalization`` says. Collective; nothing without gradients.

        Args:
            **kwargs: for the engine's ``step``.
        """
        engine = self.engine
        assert engine is not None
        if self._automatic and not self.marks.request_end:
            rank_zero_warn(
                f"The epoch ended inside request {self.marks.request_id!r}: its micro-batches so far go into "
                "the update."
            )
        window = engine.update_window
        engine.end_request()
        if not self._automatic and self.settings.normalization == "mean" and window.micro_batches > 1:
            self._tell_division(window.micro_batches)
        engine.set_gradient_accumulation_boundary(True)
        attempted = engine.attempted_updates
        engine.step(normalization=self.settings.normalization, **kwargs)
        self._update_applied = engine.was_step_applied()
        if self.settings.log_metrics and engine.attempted_updates > attempted:
            self._logged = {name: torch.as_tensor(value) for name, value in logged_metrics(engine).items()}

    def _tell_division(self, divisor: int) -> None:
        if not self._told_division:
            rank_zero_info(
                f"RequestZeRO divides this window's sum by its {divisor} micro-batches "
                "(normalization='mean'): do not divide the loss in training_step too, or use "
                "normalization='sum'."
            )
        self._told_division = True

    def after_batch(self, is_last: bool) -> None:
        """Once the batch's backwards, and the step where it had one, are done; ``is_last``: in its epoch."""
        if not self._automatic and self.marks.request_end:
            self.end_request()
        if is_last and self._automatic and self.settings.incomplete_window == "drop" and self.window_open:
            rank_zero_info(f"RequestZeRO drops the epoch's last window of {self._describe_window()}.")
            self._discard()

    def end_epoch(self) -> None:
        """Discard a window that the epoch has left open, and say so."""
        self.end_data()
        self._data_ended = False
        self.discard_window("the epoch was left inside it")
        self.marks.end_epoch()

    def discard_window(self, reason: str) -> None:
        """Forget the open window, if there is one, and warn."""
        if self.window_open:
            rank_zero_warn(f"RequestZeRO discards an open update window of {self._describe_window()}: {reason}.")
            self._discard()
            self._discarded = True

    def _discard(self) -> None:
        assert self.engine is not None
        self.engine.zero_grad()

    def _describe_window(self) -> str:
        assert self.engine is not None
        assert self.lightning_module is not None
        window, trainer = self.engine.update_window, self.lightning_module.trainer
        # Epoch and update make the text unique: Python shows the same warning once only.
        return (
            f"{window.micro_batches} micro-batches, {window.requests} ended requests (epoch "
            f"{trainer.current_epoch}, after update {trainer.global_step})"
        )

    # --- checkpoints ----------------------------------------------------------------------------------------

    @override
    def save_checkpoint(self, checkpoint: dict, filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save at an update. Collective.

        Raises:
            RuntimeError: an update window is open.
        """
        if self.engine is not None:
            self.engine.agreement.check()
        self._close_window_before_save()
        checkpoint = {**checkpoint, _RANDOM_STATES: rng.collect(self.root_device)}
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _close_window_before_save(self) -> None:
        if not self.window_open:
            return
        assert self.lightning_module is not None
        if self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED:
            # An exception ends the run: the last update is all that can still be saved.
            self.discard_window(
                "the run was interrupted inside it; a run resumed from here does not repeat its batches"
            )
            return
        raise RuntimeError(
            "A checkpoint inside an update window would lose its pending gradients, "
            f"{self._describe_window()}: save where trainer.strategy.window_open is False, such as in "
            "on_train_batch_end after the window's last batch."
        )

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Load from a clean window; in ``fit``, also keep the random state for the start. Collective."""
        checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.engine is not None:
            self._random_state = self._own_random_state(checkpoint.get(_RANDOM_STATES))
        return checkpoint

    def _own_random_state(self, states: list[rng.RandomState] | None) -> rng.RandomState | None:
        if states is not None and len(states) != self.world_size:
            rank_zero_warn(
                f"The checkpoint holds the random states of {len(states)} ranks and this run has {self.world_size}: "
                "random numbers start anew, so the run does not repeat the one that was saved."
            )
            return None
        return None if states is None else states[self.global_rank]

    @override
    def on_train_start(self) -> None:
        """A resumed run goes on with the random numbers of the run that was saved, if it had as many ranks.

        Not earlier: Lightning's loaders have drawn from the generators by now, which the other run did at its
        start.
        """
        super().on_train_start()
        if self._random_state is not None:
            rng.restore(self._random_state, self.root_device)
            self._random_state = None

    @override
    def teardown(self) -> None:
        if self._gate is not None:
            self._gate.remove()
            self._gate = None
        # A later test or predict takes the engine away.
        self._counts = {name: self._count(name) for name in _COUNTERS}
        self._traffic = self.partition_traffic
        super().teardown()


def _marks() -> WindowMarks:
    return WindowMarks(option="accumulate_grad_batches", owner="Trainer")
