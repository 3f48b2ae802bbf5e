"""The configurations that are measured, and their engines."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

RETAIN: tuple[bool | str, ...] = (False, True, "auto")
"""Values of ``retain_gpu_grad_partition_until_step`` that are compared, where it means something."""
_RETAIN_NAMES: dict[bool | str | None, str] = {None: "requestzero", False: "released", True: "retained"}


@dataclass(frozen=True)
class Engine:
    """Stock DeepSpeed, or requestzero with one value of its option."""

    requestzero: bool
    retain: bool | str | None = None
    """``None``: not set, since the configuration has no partition that could be released."""

    def __str__(self) -> str:
        return _RETAIN_NAMES.get(self.retain, str(self.retain)) if self.requestzero else "stock"


STOCK = Engine(requestzero=False)


@dataclass(frozen=True)
class Configuration:
    """One ZeRO configuration; dtypes are ``"fp32"``, ``"bf16"`` or ``"fp16"``."""

    stage: int
    offload: bool
    model: str
    accumulation: str
    masters: str = "fp32"

    def __str__(self) -> str:
        place = "offload" if self.offload else "device"
        masters = f", {self.masters} masters" if self.masters != "fp32" else ""
        return f"ZeRO-{self.stage} {place}, {self.model}/{self.accumulation}{masters}"

    @property
    def has_host_copy(self) -> bool:
        """Return true if the host gradient can hold the device partition bit for bit, so that it may be released.

        Stage 3 has no partition on the device under offload.
        """
        sums_in_fp32 = self.accumulation == self.masters == "fp32"
        return self.stage < 3 and self.offload and self.model != "fp32" and sums_in_fp32

    def engines(self) -> list[Engine]:
        """Return the engines to compare, stock first."""
        return [STOCK, *(Engine(True, retain) for retain in (RETAIN if self.has_host_copy else (None,)))]

    def deepspeed_config(self, engine: Engine, parameters: int) -> dict[str, Any]:
        """Return the config for ``requestzero.initialize`` or ``deepspeed.initialize``.

        Args:
            engine: the one that is built with it.
            parameters: of the model. Its gradients go into one bucket: DeepSpeed's default is 500 million elements.
        """
        zero: dict[str, Any] = {"stage": self.stage, "reduce_bucket_size": parameters}
        if self.offload:
            zero["offload_optimizer"] = {"device": "cpu"}
        if self.stage == 3:
            zero["stage3_param_persistence_threshold"] = 0  # small weights too are cut over the ranks
        if engine.retain is not None:
            zero["retain_gpu_grad_partition_until_step"] = engine.retain
        # What the columns tell of request ends: stage 1 reduces at the window's end by default.
        own = {"requestzero": {"reduce_gradients_at": "request"}} if engine.requestzero and self.stage == 1 else {}
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_clipping": 0.0,
            "zero_optimization": zero,
            **own,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "data_types": {"grad_accum_dtype": self.accumulation},
            **self._precision(),
        }

    def _precision(self) -> dict[str, Any]:
        if self.model == "fp32":
            return {}
        section: dict[str, Any] = {"enabled": True}
        if self.masters != "fp32":
            section[f"{self.model}_master_weights_and_grads"] = True
        if self.model == "fp16":
            section["loss_scale"] = 16.0  # a power of two: exact
        return {self.model: section}


def grid(stages: tuple[int, ...], dtypes: tuple[str, ...], full: bool) -> list[Configuration]:
    """Return stage x place x masters x accumulation dtype, for models of these dtypes.

    Args:
        stages: of ZeRO.
        dtypes: of the models.
        full: also 16-bit masters, which DeepSpeed has only with CPU offload and its own CPU Adam; and at stage 3 sums
            in the model's dtype, where stock's updates are wrong whatever the dtypes.
    """
    return [
        Configuration(stage, offload, model, accumulation, masters)
        for model in dtypes
        for stage, offload in product(stages, (False, True))
        for masters in (("fp32", model) if full and offload and model != "fp32" else ("fp32",))
        for accumulation in ((model, "fp32") if model != "fp32" and (full or stage < 3) else ("fp32",))
    ]
