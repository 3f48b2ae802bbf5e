"""Checkpoints of an engine."""

from __future__ import annotations

from typing import Any

from typing_extensions import override

from requestzero.zero.engine.other_ranks import OtherRanksEngine
from requestzero.zero.overflow.skips import SkipRecord

_SKIPS_IN_CHECKPOINT = "requestzero_skips"


class CheckpointingEngine(OtherRanksEngine):
    """Saves and loads with DeepSpeed's files what DeepSpeed's engine does not know of."""

    @override
    def save_checkpoint(
        self,
        save_dir: str,
        tag: str | None = None,
        client_state: dict[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Save as DeepSpeed does (collective), with the counters that it does not have among the client's state.

        Args:
            save_dir: folder of checkpoints.
            tag: name of this one; DeepSpeed's ``global_step<n>`` unless given.
            client_state: anything else to save with it; not changed.
            *args: for DeepSpeed's ``save_checkpoint``.
            **kwargs: likewise.

        Returns:
            True, as DeepSpeed does.

        Raises:
            RuntimeError: the window is open; its gradients would be missing from the checkpoint.
            RankDisagreementError: another rank does something else, or the ranks have disagreed before.
        """
        self.agreement.before_checkpoint("saves")
        if self.has_pending_gradients:
            raise RuntimeError(
                f"save_checkpoint() with an open update window ({self.update_window.micro_batches} micro-batches "
                "since the last step): their gradients would be lost on resume. Save after step(), or call zero_grad() "
                "to discard them."
            )
        state = {**(client_state or {}), _SKIPS_IN_CHECKPOINT: self._skips.state_dict()}
        return super().save_checkpoint(save_dir, tag, state, *args, **kwargs)

    @override
    def load_checkpoint(self, load_dir: str, *args: Any, **kwargs: Any) -> Any:
        """Load as DeepSpeed does (collective); the open window is discarded, unless there is no checkpoint to load.

        Args:
            load_dir: folder of checkpoints.
            *args: for DeepSpeed's ``load_checkpoint`` (``tag``, ``load_module_only`` and others).
            **kwargs: likewise.

        Returns:
            Path of the checkpoint, ``None`` without one, and the client's state.

        Raises:
            RankDisagreementError: another rank does something else, or the ranks have disagreed before.
        """
        self.agreement.before_checkpoint("loads")
        loaded = super().load_checkpoint(load_dir, *args, **kwargs)
        path, client_state = loaded
        if path is not None:
            self.zero_grad()
            record = client_state.pop(_SKIPS_IN_CHECKPOINT, {})
            # DeepSpeed gives its counters to the client where only the module was loaded.
            if "skipped_steps" not in client_state:
                self._skips = SkipRecord.from_state(record)
        return loaded
