from .config_utils import DeepSpeedConfigModel

BFLOAT16: str

class DeepSpeedFP16Config(DeepSpeedConfigModel):
    enabled: bool

class DeepSpeedBF16Config(DeepSpeedConfigModel):
    enabled: bool
