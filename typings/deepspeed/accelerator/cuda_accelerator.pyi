from .abstract_accelerator import DeepSpeedAccelerator

class CUDA_Accelerator(DeepSpeedAccelerator):
    def device_name(self, device_index: int | None = None) -> str: ...
    def memory_reserved(self, device_index: int | None = None) -> int:
        """Bytes that the caching allocator holds, used or not."""
    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device."""
