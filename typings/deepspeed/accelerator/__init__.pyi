from .real_accelerator import get_accelerator as get_accelerator
from .real_accelerator import set_accelerator as set_accelerator
