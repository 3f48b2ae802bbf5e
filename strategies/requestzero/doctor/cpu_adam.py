"""Requirements for compiling DeepSpeed's Adam for CPU offload. Nothing is compiled."""

from __future__ import annotations

import shutil
from dataclasses import dataclass

from requestzero.environment.build_lock import lock_state
from requestzero.environment.cpu_adam import build_folder


@dataclass(frozen=True)
class CpuAdam:
    """Requirements of ``DeepSpeedCPUAdam``, which is compiled on first use; PyTorch's optimizers have none of them."""

    compiler: str | None
    """Path of the C++ compiler (``$CXX``, else ``c++``) if PyTorch can build extensions with it."""
    ninja: str | None
    """Path of ninja, which PyTorch starts by name."""
    compatible: bool
    """True if DeepSpeed's op builder finds the machine compatible."""
    lock: str
    """State of the lock of its build folder, see :class:`~requestzero.environment.build_lock.LockState`."""
    lock_path: str
    """Place of the lock, whether it exists or not."""

    @property
    def ok(self) -> bool:
        return self.compiler is not None and self.ninja is not None and self.compatible


def check_cpu_adam() -> CpuAdam:
    """Check the requirements by DeepSpeed's own op builder, which is loaded for it.

    Raises:
        ImportError: DeepSpeed is not installed.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import check_compiler_ok_for_platform, get_cxx_compiler

    lock = build_folder() / "lock"
    compiler = get_cxx_compiler()
    builder = get_accelerator().create_op_builder("CPUAdamBuilder")
    return CpuAdam(
        compiler=shutil.which(compiler) if check_compiler_ok_for_platform(compiler) else None,
        ninja=shutil.which("ninja"),
        compatible=builder is not None and bool(builder.is_compatible()),
        lock=lock_state(lock).value,
        lock_path=str(lock),
    )
