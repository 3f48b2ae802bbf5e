from enum import Enum

from ..config_utils import DeepSpeedConfigModel

class OffloadDeviceEnum(str, Enum):
    none = "none"
    cpu = "cpu"

class OffloadStateTypeEnum(str, Enum):
    lp_grads = "lp_grads"

class DeepSpeedZeroOffloadOptimizerConfig(DeepSpeedConfigModel):
    """Pins host memory unless told otherwise."""

    device: OffloadDeviceEnum
