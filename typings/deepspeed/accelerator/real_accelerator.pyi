from .abstract_accelerator import DeepSpeedAccelerator
from .cpu_accelerator import CPU_Accelerator
from .cuda_accelerator import CUDA_Accelerator

# Of the accelerators that there are, the two that requestzero supports.
def get_accelerator() -> CPU_Accelerator | CUDA_Accelerator: ...
def set_accelerator(accel_obj: DeepSpeedAccelerator) -> None: ...
