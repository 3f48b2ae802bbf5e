from .abstract_accelerator import DeepSpeedAccelerator

class CPU_Accelerator(DeepSpeedAccelerator):
    def device_name(self, device_index: int | None = None) -> str: ...
