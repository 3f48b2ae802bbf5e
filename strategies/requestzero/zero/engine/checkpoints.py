"""Checkpoints of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from typing_extensions import override

from requestzero.zero.checkpoint.files import find_tag
from requestzero.zero.engine.announcements import ends_together
from requestzero.zero.engine.damaged_files import check_files
from requestzero.zero.engine.other_ranks import OtherRanksEngine
from requestzero.zero.overflow.skips import SkipRecord
from requestzero.zero.window_checkpoint import replacing, saving
from requestzero.zero.window_checkpoint.record import SavedWindow
from requestzero.zero.window_checkpoint.together import on_one_rank, together, true_on_all

_SKIPS_IN_CHECKPOINT = "requestzero_skips"
_APPLIED_IN_CHECKPOINT = "requestzero_applied_requests"


class CheckpointingEngine(OtherRanksEngine):
    """Saves and loads beside DeepSpeed's files what DeepSpeed does not know of: counters, and the open window."""

    @property
    def inside_request(self) -> bool:
        """True between a request's first backward and its end, and in a backward: nothing can be saved there."""
        optimizer = self.optimizer
        in_backward = optimizer._backward_active_depth > 0
        return self.update_window.request_open or in_backward or bool(optimizer.has_unseen_gradients)

    # --- saving -----------------------------------------------------------------------------------------------------

    @override
    @ends_together
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save as DeepSpeed does (collective), and the open window in files of its own beside DeepSpeed's.

        The folder of the tag is written beside its place and moved there as a whole, ``latest`` after it: a process
        that dies meanwhile leaves what was there before. (Not with an asynchronous checkpoint engine of DeepSpeed's,
        which has a commit of its own.)

        Args:
            save_dir: folder of checkpoints.
            tag: name of this one; DeepSpeed's ``global_step<n>`` unless given. A folder of that name is replaced; what
                others have put into it stays. The same on all ranks.
            client_state: anything else to save with it; not changed.
            save_latest: write the tag into the file ``latest``, which names the checkpoint to load by default.
            exclude_frozen_parameters: leave them out.

        Returns:
            True, as DeepSpeed does.

        Raises:
            RuntimeError: inside a request; or a window is open that cannot be saved (experts or model parallelism).
                On all ranks, if the folder cannot be moved to its place.
            RankDisagreementError: another rank does something else, or the ranks have disagreed before.
        """
        tag = f"global_step{self.global_steps}" if tag is None else str(tag)
        self.agreement.before_checkpoint("saves", tag)
        self._complete_window()
        state = {
            **(client_state or {}),
            _SKIPS_IN_CHECKPOINT: self._skips.state_dict(),
            _APPLIED_IN_CHECKPOINT: self._applied.state_dict(),
        }
        if not save_dir or self.checkpoint_engine.is_decoupled():
            return super().save_checkpoint(save_dir, tag, state, save_latest, exclude_frozen_parameters)
        self._save_as_a_whole(Path(save_dir), tag, state, save_latest, exclude_frozen_parameters)
        return True

    def _complete_window(self) -> None:
        """Reduce what waits, so that the sums are complete; raise inside a request. Collective."""
        if self.inside_request:
            raise RuntimeError(
                f"save_checkpoint() inside a request ({self.update_window.micro_batches} micro-batches since the last "
                "step), whose gradients are not complete: save after its end, which "
                "set_gradient_accumulation_boundary(True) before its last backward brings, or end_request() after it; "
                "or call zero_grad() to discard the update window."
            )
        with self.optimizer.rollback.suspended():
            self.optimizer.reduce_pending()
        self.optimizer.rollback.keep()  # an abort would leave in the checkpoint what it takes out of this run
        if self.update_window.is_open:
            self._check_can_save_window()

    def _check_can_save_window(self) -> None:
        cause = None
        if self.has_moe_layers:
            cause = "mixture-of-experts layers, whose parameters have the same names on several ranks"
        elif self.optimizer.ranks.size != dist.get_world_size():
            cause = "model or pipeline parallelism, in which several ranks own the same part of a parameter"
        elif self.checkpoint_engine.is_decoupled():
            cause = "an asynchronous checkpoint engine of DeepSpeed's"
        if cause is not None:
            raise RuntimeError(
                f"save_checkpoint() with an open update window ({self.update_window.micro_batches} micro-batches "
                f"since the last step) is not possible with {cause}: save after step(), or call zero_grad() to discard "
                "the window."
            )

    def _save_as_a_whole(
        self, save_dir: Path, tag: str, state: dict[str, Any], save_latest: bool, exclude_frozen: bool
    ) -> None:
        folder = save_dir / tag
        staging, moves = replacing.staging_of(folder), self._begin_folder(folder)
        super().save_checkpoint(str(save_dir), str(staging.relative_to(save_dir)), state, False, exclude_frozen)
        if self.update_window.is_open:
            stage, offload = self.zero_optimization_stage(), bool(self.zero_offload_optimizer())
            saving.save(self.optimizer, staging, stage=stage, offload=offload, writes_record=moves)
        self.agreement.before_collective("the end of a save")
        on_one_rank(moves, lambda: replacing.commit(folder, _is_of_a_checkpoint))
        if save_latest:
            on_one_rank(moves, lambda: replacing.write_file(save_dir / "latest", tag))

    def _begin_folder(self, folder: Path) -> bool:
        """Make the folder in which to write; return whether this rank moves it to its place. Collective."""
        moves = self._moves_folders
        on_one_rank(moves, lambda: replacing.begin(folder))
        if true_on_all(replacing.staging_of(folder).is_dir()):
            return moves
        on_each_node = self.local_rank == 0  # the nodes have disks of their own
        on_one_rank(on_each_node and not moves, lambda: replacing.begin(folder))
        return on_each_node

    @property
    def _moves_folders(self) -> bool:
        """True on one rank of all, or of each node where checkpoints lie on the nodes."""
        return (self.local_rank if self.use_node_local_storage() else self.global_rank) == 0

    # --- loading ----------------------------------------------------------------------------------------------------

    @override
    @ends_together
    def load_checkpoint(
        self, load_dir: str, tag: str | None = None, *args: Any, discard_window: bool = False, **kwargs: Any
    ) -> Any:
        """Load as DeepSpeed does, and go on with the update window that was open in the checkpoint. Collective.

        The engine's own open window is discarded, unless there is no checkpoint to load. The stage, offload of the
        optimizer, the accumulation dtype and the number of ranks may be others than those that were saved; at stage 3
        another number of ranks needs ``python -m requestzero.checkpoint convert``.

        Args:
            load_dir: folder of checkpoints.
            tag: name of one; that in the file ``latest`` unless given. The same on all ranks, also where each reads a
                ``latest`` of its own, as on the disks of nodes.
            *args: for DeepSpeed's ``load_checkpoint`` (``load_module_strict`` and others).
            discard_window: leave out the window in the checkpoint, and begin with an empty one. So does
                ``load_module_only``.
            **kwargs: for DeepSpeed's ``load_checkpoint``.

        Returns:
            Path of the checkpoint, ``None`` without one, and the client's state.

        Raises:
            ValueError: a file is damaged; the checkpoint, or its window, is that of other parameters; or another number
                of ranks has saved it at stage 3.
            RankDisagreementError: another rank does something else, loads another tag, or has failed, or the ranks have
                disagreed before.
        """
        found = find_tag(Path(load_dir), self.load_universal_checkpoint()) if tag is None else str(tag)
        self.agreement.before_checkpoint("loads", found)
        if found is not None:
            folder = Path(load_dir, found)
            on_one_rank(self._moves_folders, lambda: replacing.recover(folder))
            with_window = not (discard_window or kwargs.get("load_module_only", False))
            together(lambda: check_files(folder, self.global_rank, dist.get_world_size(), with_window))
        loaded = super().load_checkpoint(load_dir, tag, *args, **kwargs)
        self.agreement.before_collective("the end of a load")
        path, client_state = loaded
        if path is not None:
            self.zero_grad()
            record = client_state.pop(_SKIPS_IN_CHECKPOINT, {})
            applied = client_state.pop(_APPLIED_IN_CHECKPOINT, {})
            # DeepSpeed gives its counters to the client where only the module was loaded.
            if "skipped_steps" not in client_state:
                self._skips = SkipRecord.from_state(record)
                self._applied.load_state_dict(applied)
                if not discard_window:
                    self._load_window(Path(path).parent)
        return loaded

    def _load_window(self, folder: Path) -> None:
        try:
            together(lambda: self._read_window(folder))
        except Exception:
            self.zero_grad()  # other ranks have loaded theirs
            raise
        if not self.managed_gradient_accumulation():
            self._unmanaged_backward_count = self.update_window.micro_batches

    def _read_window(self, folder: Path) -> None:
        saved = SavedWindow.read(folder)
        if saved is not None:
            self.optimizer.load_window(folder, saved)


def _is_of_a_checkpoint(name: str) -> bool:
    """Return whether DeepSpeed or this package writes a file of this name into a tag's folder."""
    return name.endswith("_states.pt") or name.startswith(("layer_", "requestzero_window", "zero"))
