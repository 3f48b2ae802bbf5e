from torch import nn

class PartitionedParameterCoordinator:
    def _PartitionedParameterCoordinator__params_to_release(
        self, submodule_to_release: nn.Module, step_id: int
    ) -> set[int]:
        """Cached by all of its arguments, in a function that is measured."""
    def _PartitionedParameterCoordinator__all_gather_params_(
        self, params: set[nn.Parameter], forward: bool, quantize: bool = False
    ) -> None:
        """Asks one of the parameters to gather them; of the handle that it gets only ``wait()`` is called."""
    def reset_step(self) -> None:
        """Called before a forward, and where a module calls itself."""
    def trace_prologue(self, sub_module: nn.Module) -> None:
        """Called before a module runs, with the next two."""
    def record_module(self, sub_module: nn.Module) -> None:
        """Note that the module runs, while the order is being recorded."""
    def fetch_sub_module(self, current_submodule: nn.Module, forward: bool) -> None:
        """Gather the module's weights, and begin with those of the next ones by the recorded order; nothing else."""
    def release_sub_module(self, submodule: nn.Module, forward: bool = False) -> None:
        """Release the module's weights unless they are needed soon; nothing else."""
    def is_record_trace(self) -> bool:
        """Return whether the order of modules is being recorded, for :meth:`record_module`."""
    def is_invalid_trace(self) -> bool:
        """Return whether the order was given up, and is recorded anew from the next start."""
    def _invalidate_trace(self) -> None:
        """Record the order anew; an error where it is invalid already."""
