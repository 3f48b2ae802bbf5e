"""DeepSpeed's process-wide device, set to the Trainer's."""

from __future__ import annotations

import torch


def use_deepspeed_device(device: torch.device) -> None:
    """Make DeepSpeed work on the kind of device that the Trainer has chosen, in this process.

    DeepSpeed picks CUDA wherever there is a GPU, unless ``DS_ACCELERATOR=cpu`` stands in the environment when
    it is first used; the Trainer's ``accelerator`` is what the user has said already. Where both agree
    nothing is touched.
    """
    from deepspeed.accelerator import get_accelerator, set_accelerator
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    wanted = {"cpu": CPU_Accelerator, "cuda": CUDA_Accelerator}[device.type]
    if get_accelerator().device_name() != device.type:
        set_accelerator(wanted())


def supports_fp16(device: torch.device) -> bool:
    """Return True if DeepSpeed accepts fp16 on this kind of device."""
    from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator

    accelerator = CPU_Accelerator() if device.type == "cpu" else CUDA_Accelerator()
    return bool(accelerator.is_fp16_supported())
