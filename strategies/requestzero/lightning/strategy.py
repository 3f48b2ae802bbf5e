"""The Lightning strategy: what users build and read, and Lightning's methods that it overrides.

Written for Lightning 2.6.6. Every override is a few lines long and says what differs; the work is done by the objects
and modules that it names.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.strategies import _StrategyRegistry
from lightning.fabric.utilities.types import _PATH
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch.optim import Optimizer
from typing_extensions import override

from requestzero.config.options import OverflowSettings
from requestzero.environment.cpu_adam import clear_abandoned_lock
from requestzero.environment.versions import require_supported_deepspeed
from requestzero.lightning import checks
from requestzero.lightning import config as configs
from requestzero.lightning.callback_checks import let_go
from requestzero.lightning.checkpoint_plugins import check_folder_plugin
from requestzero.lightning.checkpointing import Checkpointing, check_saves_weights_only
from requestzero.lightning.given import NotesArguments, given_names
from requestzero.lightning.loops import extend_loops
from requestzero.lightning.module_state import capturing, loading_parts
from requestzero.lightning.options import check_options
from requestzero.lightning.precision import RequestZeROPrecision
from requestzero.lightning.read_outs import ReadableStrategy
from requestzero.lightning.registered_names import register_names
from requestzero.lightning.requeue import DeferredRequeue
from requestzero.lightning.sigterm import NotedSigterm
from requestzero.lightning.strategy_facts import TRAINER
from requestzero.lightning.update_counts import UpdateCounts
from requestzero.lightning.window_driver import WindowDriver
from requestzero.zero.window_checkpoint.replacing import appearing, recover
from requestzero.zero.window_checkpoint.together import on_one_rank


class RequestZeRO(ReadableStrategy, NotesArguments):
    """ZeRO 1, 2 or 3 in which every optimizer step applies exactly the sum of its window's requests.

    A *request* is one or more micro-batches, an *update window* all requests between two optimizer steps. Every batch
    is a request of one micro-batch and ``Trainer(accumulate_grad_batches=N)`` makes N requests an update, unless the
    loader yields :class:`~requestzero.MicroBatch`, which says where requests (and windows) end. The model, its hooks
    and callbacks see the ``inputs`` only.

    The loss is not divided by ``accumulate_grad_batches``: the step divides the window's sum once, as
    ``normalization`` says, before clipping and :attr:`grad_norm`. The default is the mean over the window's
    micro-batches, as in other front ends and unlike ``engine.step()``, which divides by nothing unless asked.

    Which counters count updates and which count batches, manual optimization, and what becomes of windows that are
    left open: see :mod:`requestzero.lightning`.

    Args:
        stage: See :class:`~requestzero.config.options.RequestZeROSettings` for this and the options up to
            ``overflow``.
        offload_optimizer: Master weights and optimizer step on the CPU.
        offload_parameters: Stage 3: this rank's part of the weights on the CPU while nothing needs it.
        retain_gpu_grad_partition_until_step: True trades device memory between requests for copies, ``"auto"`` while
            there is enough of it; needs offload, and fp32 accumulation on a 16-bit model.
        grad_accum_dtype: dtype of the window's running sum.
        normalization: What the window's sum is divided by. With ``"token"`` the loss is a sum, and the loader's
            ``MicroBatch(weight=...)`` or :meth:`add_weight` says of how many tokens.
        overflow: :class:`~requestzero.config.options.OverflowSettings` or a mapping of its fields.
        config: Further DeepSpeed keys: a mapping (a dict, an OmegaConf object), or the path of a JSON or YAML file.
            Merged with the arguments; only an argument that is not given gives way to it. (Where all arguments are
            given, as LightningCLI does, one that has its default's value counts as not given.)
        incomplete_window: What happens to an epoch's last, shorter window (automatic optimization).
        log_metrics: Whether the Trainer's loggers get :attr:`logged_metrics` with every update that they log.
        reduce_gradients_at: When gradients are summed over the ranks, see
            :class:`~requestzero.config.options.RequestZeROSettings`.
        rank_agreement: Whether ranks agree on every request, so that those that do not do the same raise the same
            :class:`~requestzero.errors.RankDisagreementError`: a rank that runs out of data, one whose loader,
            ``training_step`` or callback raises, or whose ``training_step`` returns ``None`` while others' do not.
        rank_dependent_parameters: Whether parameters may take part on some ranks only.
        gradients_in_hooks: Whether ``p.grad`` can be read and changed in ``on_before_optimizer_step`` and
            ``configure_gradient_clipping``. Not at stage 3.
        compare_weights: Whether weights that were written through ``param.data`` count.
        abort: Whether any request can be aborted (:class:`~requestzero.AbortRequest` in ``training_step``).
        **deepspeed_options: Those of Lightning's ``DeepSpeedStrategy`` that mean something here. Its
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
        reduce_gradients_at: str | None = None,
        rank_agreement: bool = True,
        offload_parameters: bool = False,
        rank_dependent_parameters: bool = False,
        gradients_in_hooks: bool = True,
        compare_weights: bool = True,
        abort: bool = False,
        **deepspeed_options: Any,
    ) -> None:
        require_supported_deepspeed()
        check_options(deepspeed_options)
        own: dict[str, Any] = {
            "stage": stage,
            "offload_optimizer": offload_optimizer,
            "offload_parameters": offload_parameters,
            "retain_gpu_grad_partition_until_step": retain_gpu_grad_partition_until_step,
            "grad_accum_dtype": grad_accum_dtype,
            "normalization": normalization,
            "overflow": overflow,
            "incomplete_window": incomplete_window,
            "log_metrics": log_metrics,
            "reduce_gradients_at": reduce_gradients_at,
            "rank_agreement": rank_agreement,
            "rank_dependent_parameters": rank_dependent_parameters,
            "gradients_in_hooks": gradients_in_hooks,
            "compare_weights": compare_weights,
            "abort": abort,
        }
        init, args, kwargs = self._call
        del self._call
        if init is not RequestZeRO.__init__:  # that of a derived class, which may pass on whatever it wants
            init, args, kwargs = RequestZeRO.__init__, (), {**own, "config": config, **deepspeed_options}
        given = given_names(init, args, kwargs)
        merged_config, self.settings = configs.merge_arguments(own, deepspeed_options, given, config)
        self.window_driver = WindowDriver(self)
        self._checkpointing = Checkpointing(self.window_driver)
        self._kept_counts = UpdateCounts()
        super().__init__(
            stage=stage, offload_optimizer=self.settings.offload_optimizer, config=None, **deepspeed_options
        )
        self.config = merged_config

    def __repr__(self) -> str:
        """Say where it belongs: other Trainers, and Fabric, show this in their error."""
        return (
            f"<RequestZeRO(stage={self.settings.stage}), for the Trainer of lightning.pytorch "
            "(import lightning.pytorch as pl), not for that of pytorch_lightning, nor for Fabric, for which there is "
            "requestzero.RequestZeROFabric>"
        )

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: _StrategyRegistry) -> None:
        """Register our own names, and not Lightning's. Doing it again changes nothing."""
        register_names(strategy_registry, cls, cls.strategy_name)

    # --- what users call ------------------------------------------------------------------------------------

    def end_request(self) -> None:
        """End the open request now: for manual optimization with several requests in a batch. Collective."""
        self.window_driver.end_request()

    @contextmanager
    def gradients(self) -> Generator[None, None, None]:
        """Let ``p.grad`` be the open window's gradient in the block, and let its changes count. Collective.

        For manual optimization, between the window's last backward and ``opt.step()``; in the hooks before a step it is
        done already, see ``gradients_in_hooks``. Not at stage 3. The gradient is summed over the window, averaged
        over ranks and divided as the step divides it; each rank holds all of it in the block. The open request ends.

        Example::

            with self.trainer.strategy.gradients():
                torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
            opt.step()
        """
        with self.window_driver.gradients():
            yield

    def add_weight(self, weight: float | torch.Tensor) -> None:
        """Report the weight of one backward, for ``normalization="token"``: once for each. Not collective.

        In automatic optimization for batches without ``MicroBatch(weight=...)``, from ``training_step``. In manual
        optimization right before ``manual_backward``, where :attr:`batch_weight` is the loader's.

        Args:
            weight: a finite number of at least 0, or a tensor of one element on any device, which is not read before
                the step.

        Raises:
            ValueError: not such a number, or the batch has a weight already (automatic optimization).
        """
        self.window_driver.add_weight(weight)

    # --- construction: Trainer, processes, engine -----------------------------------------------------------

    @property
    @override
    def precision_plugin(self) -> Precision:
        """Unchanged; a property is overridden as a whole."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, precision_plugin: Precision | None) -> None:
        """Replace Lightning's plain ``DeepSpeedPrecision`` by one that tells the window driver."""
        if precision_plugin is not None:
            precision_plugin = RequestZeROPrecision(checks.check_plugin(precision_plugin).precision, self.window_driver)
        self._precision_plugin = precision_plugin

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        """Also make the Trainer's loops and checkpoints go by windows in a fit."""
        if trainer.state.fn == TrainerFn.FITTING:
            checks.check_training_step(trainer.lightning_module)
            self.window_driver.begin_fit()
            extend_loops(trainer)
            self._checkpointing.hold_back(trainer.checkpoint_callbacks)
            if self.settings.offload_optimizer:
                clear_abandoned_lock()  # an optimizer of the module's may be DeepSpeedCPUAdam, which waits for it
            driver = self.window_driver
            driver.sigterm = NotedSigterm(trainer._signal_connector) if trainer.world_size > 1 else None
            several = trainer.world_size > 1  # which get the signal at different moments, so that rank 0 decides
            driver.requeue = DeferredRequeue(
                trainer._signal_connector, lambda: several or driver.in_batch or driver.inside_request
            )
        super().setup(trainer)

    # --- training -------------------------------------------------------------------------------------------

    @property
    @override
    def handles_gradient_accumulation(self) -> bool:
        """False: Lightning then calls the optimizer and its hooks once per window, not per micro-batch."""
        return False

    @override
    def on_train_start(self) -> None:
        """Also go on with the random numbers of the run that was saved.

        Not earlier: Lightning's loaders have drawn from the generators by now, which the other run did at its start.
        """
        super().on_train_start()
        self.window_driver.serve_torch_clipping()
        self._checkpointing.restore_random_state(self.root_device)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        """Block nothing: ZeRO 2 has to reduce in every backward, ZeRO 1 waits for the request's end."""
        yield

    @override
    def backward(
        self, closure_loss: torch.Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Also tell the engine whether this backward is the request's last, and its weight.

        Raises:
            ValueError: ``normalization="token"``, and the batch has no weight.
        """
        self.window_driver.before_backward()
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    @override
    def save_checkpoint(self, checkpoint: dict, filepath: _PATH, storage_options: Any | None = None) -> None:
        """Save between requests, with all ranks' random states and the ``state_dict`` that hooks have left. Collective.

        An open update window is saved too. The folder appears as a whole. ``weights_only`` makes one file in
        Lightning's own format, as DDP does, at stages 1 and 2.

        Raises:
            RuntimeError: a request is open, or an evaluation has taken the trained engine away.
            ValueError: ``weights_only`` at stage 3, or a ``CheckpointIO`` plugin that would be left out.
            RankDisagreementError: another rank does something else.
        """
        if "optimizer_states" not in checkpoint:
            check_saves_weights_only(self.settings.stage)
            DDPStrategy.save_checkpoint(self, checkpoint, filepath, storage_options)
            return
        check_folder_plugin(self._checkpoint_io, TRAINER)
        checkpoint = self._checkpointing.before_save(checkpoint, self.root_device)
        path, engine = Path(self.broadcast(filepath)), self.deepspeed_engine
        with self._checkpointing.saving_module(checkpoint, engine), appearing(path, self.is_global_zero) as folder:
            super().save_checkpoint(checkpoint, folder, storage_options)
            self.window_driver.before_collective("the end of trainer.save_checkpoint")

    @override
    def load_checkpoint(self, checkpoint_path: _PATH, weights_only: bool | None = None) -> dict[str, Any]:
        """Also give the hooks the ``state_dict``, and keep the random state for the start of a fit. Collective.

        A single file with weights, such as another strategy saves, can be evaluated. At stage 3 DeepSpeed puts the
        parts of a folder's weights into the module itself, and hooks see no ``state_dict``.

        Raises:
            ValueError: a single file, in a fit; or a ``CheckpointIO`` plugin that would be left out.
            RankDisagreementError: another rank does something else.
        """
        self._checkpointing.before_load(checkpoint_path)
        on_one_rank(self.is_global_zero, lambda: recover(Path(checkpoint_path)))
        if Path(checkpoint_path).is_file():
            return DDPStrategy.load_checkpoint(self, checkpoint_path, weights_only)
        check_folder_plugin(self._checkpoint_io, TRAINER)
        loading = loading_parts if self.zero_stage_3 else capturing
        with loading(self.deepspeed_engine) as captured:
            checkpoint = super().load_checkpoint(checkpoint_path, weights_only)
        if self.engine is not None:
            self._checkpointing.after_load(checkpoint, self.global_rank, self.world_size)
        return {**checkpoint, **captured}

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load the ``state_dict`` that the hooks have left, where Lightning's version has had DeepSpeed load before."""
        if not self.zero_stage_3:
            DDPStrategy.load_model_state_dict(self, checkpoint, strict)
        elif "state_dict" in checkpoint:  # of a single file
            self._restore_zero_state(checkpoint, strict=strict)

    @override
    def barrier(self, name: str | None = None) -> None:
        """Also agree to it in a fit, so that a rank alone in it is an error."""
        self.window_driver.before_collective("a barrier" if name is None else f"barrier {name}")
        super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Also agree to it in a fit, so that a rank alone in it is an error."""
        self.window_driver.before_collective("a broadcast")
        return super().broadcast(obj, src)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Also tell the other ranks of what was raised outside the training loop."""
        if isinstance(exception, Exception):
            self.window_driver.fail(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        """Also keep the counts: a later evaluation takes the engine away."""
        self._checkpointing.release()
        if self.window_driver.requeue is not None:
            self.window_driver.requeue.remove()
        if self.window_driver.sigterm is not None:
            self.window_driver.sigterm.remove()
        if self.lightning_module is not None:
            let_go(self.lightning_module.trainer.callbacks)  # type: ignore[attr-defined]
        self._kept_counts = self._counts
        super().teardown()
