"""Checkpoints that another number of ranks has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepspeed import comm as dist
from typing_extensions import override

from requestzero.zero.checkpoint.files import is_universal, optimizer_files
from requestzero.zero.engine.announcements import AnnouncingEngine
from requestzero.zero.stage_1_and_2.optimizer import RequestZeROOptimizer
from requestzero.zero.stage_1_and_2.optimizer_parts import is_muon_group
from requestzero.zero.stage_1_and_2.resharding import own_states


class OtherRanksEngine(AnnouncingEngine):
    """Loads the checkpoints of another number of ranks: at stages 1 and 2 as they are, else in the universal format."""

    _universal_found: bool = False
    """The checkpoint that is being loaded, or was loaded last, is in DeepSpeed's universal format."""

    @override
    def load_universal_checkpoint(self) -> bool:
        """Return true also for a universal checkpoint that the config has not announced."""
        return self._universal_found or super().load_universal_checkpoint()

    @override
    def _load_checkpoint(self, load_dir: str, tag: str, *args: Any, **kwargs: Any) -> Any:
        """Also recognise the universal format, and refuse before anything is loaded what only that makes possible."""
        folder = Path(load_dir, tag)
        self._universal_found = is_universal(folder)
        needs_states = kwargs.get("load_optimizer_states", True) and not kwargs.get("load_module_only", False)
        if self.zero_optimization_partition_weights() and needs_states and not self.load_universal_checkpoint():
            self._refuse_other_ranks(folder)
        return super()._load_checkpoint(load_dir, tag, *args, **kwargs)

    def _refuse_other_ranks(self, folder: Path) -> None:
        saved = len(optimizer_files(folder))
        if saved not in (0, self.seq_dp_world_size):
            raise ValueError(
                f"{folder} was saved by {saved} ranks and this run has {self.seq_dp_world_size}, for which a "
                "checkpoint of ZeRO stage 3 has to be converted: run `python -m requestzero.checkpoint convert "
                f"{folder} NEW_FOLDER` and load NEW_FOLDER."
            )

    @override
    def _load_zero_checkpoint(self, load_dir: str, tag: str, load_optimizer_states: bool = True) -> bool:
        """Load the optimizer; of another number of ranks, from all their files this rank's slices, by name.

        Every rank needs all files, so they must lie where every node finds them.
        """
        optimizer, saved = self.optimizer, self.loaded_checkpoint_dp_world_size
        is_cut_otherwise = load_optimizer_states and saved != self.seq_dp_world_size
        if self.load_universal_checkpoint() or not is_cut_otherwise or not isinstance(optimizer, RequestZeROOptimizer):
            return super()._load_zero_checkpoint(load_dir, tag, load_optimizer_states)
        _refuse_whole_momentum(optimizer)
        names = self._get_all_zero_checkpoint_names(load_dir, tag, self.bfloat16_enabled())
        with self.failing_together():  # a file may be out of one rank's reach
            states = own_states(optimizer, [Path(name) for name in names])
        optimizer.load_state_dict(
            [states] * dist.get_world_size(optimizer.dp_process_group),
            load_from_fp32_weights=self.zero_load_from_fp32_weights(),
        )
        return True


def _refuse_whole_momentum(optimizer: RequestZeROOptimizer) -> None:
    """Raise ValueError for Muon on the device, where every rank keeps the momentum of whole matrices."""
    groups = range(len(optimizer.bit16_groups))
    if not optimizer.cpu_offload and any(is_muon_group(optimizer, index) for index in groups):
        raise ValueError(
            "The momentum of Muon on the device is not cut into the partitions of ranks, so that another number of "
            "ranks cannot load it: go on with as many ranks as have saved, or without the optimizer's state "
            "(load_optimizer_states=False)."
        )
