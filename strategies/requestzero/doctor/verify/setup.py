"""One configuration of the grid, and the DeepSpeed config that it stands for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

KEEP_OPTIMIZER = {"zero_force_ds_cpu_optimizer": False}
"""With CPU offload DeepSpeed asks for its own Adam otherwise, which is compiled first."""


@dataclass(frozen=True)
class Setup:
    """One configuration of the grid; its text names what differs from the default."""

    stage: int = 2
    offload: bool = False
    model: str = "fp32"
    """Dtype of the model."""
    accum: str = "fp32"
    """Dtype of the accumulated gradient."""
    checkpointing: str = "none"
    groups: int = 1
    """Number of parameter groups."""
    managed: bool = True
    """``managed_gradient_accumulation``."""
    retain: bool | str = False
    """``retain_gpu_grad_partition_until_step``."""
    at: str | None = None
    """``reduce_gradients_at``."""
    optimizer: str = "sgd"
    """``"sgd"``, ``"adamw"`` (PyTorch's) or ``"cpu_adam"`` (DeepSpeed's)."""
    zero: dict[str, Any] = field(default_factory=dict)
    """More of the section ``zero_optimization``."""
    config: dict[str, Any] = field(default_factory=dict)
    """More of the DeepSpeed config; a section replaces the one that the other fields give."""

    def __str__(self) -> str:
        default = asdict(Setup())
        options = {k: v for k, v in asdict(self).items() if v != default[k]}
        return " ".join(f"{k}={v}" for k, v in options.items()) or "default"

    def deepspeed_config(self, requestzero: bool = True) -> dict[str, Any]:
        """Return the config, without this package's own keys unless ``requestzero``."""
        zero: dict[str, Any] = {"stage": self.stage, **self.zero}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.retain and requestzero:
            zero["retain_gpu_grad_partition_until_step"] = self.retain
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            **KEEP_OPTIMIZER,
            "data_types": {"grad_accum_dtype": self.accum},
            "managed_gradient_accumulation": self.managed,
        }
        if self.at and requestzero:
            config["requestzero"] = {"reduce_gradients_at": self.at}
        if self.model != "fp32":
            config[self.model] = {"enabled": True}
        return config | self.config
