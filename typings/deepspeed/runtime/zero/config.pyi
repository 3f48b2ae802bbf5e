from typing import Any

from ..config_utils import DeepSpeedConfigModel
from .offload_config import DeepSpeedZeroOffloadOptimizerConfig

ZERO_OPTIMIZATION: str

class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    stage: Any
    overlap_comm: bool | None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None
    zenflow: Any
