from .logging import logger as logger
from .tensor_fragment import safe_get_full_fp32_param as safe_get_full_fp32_param
from .tensor_fragment import safe_get_full_grad as safe_get_full_grad
