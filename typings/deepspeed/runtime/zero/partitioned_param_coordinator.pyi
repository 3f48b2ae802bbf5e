from torch import nn

class PartitionedParameterCoordinator:
    def _PartitionedParameterCoordinator__params_to_release(
        self, submodule_to_release: nn.Module, step_id: int
    ) -> set[int]:
        """Cached by all of its arguments, in a function that is measured."""
