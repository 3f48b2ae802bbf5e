from ..zero.stage3 import DeepSpeedZeroOptimizer_Stage3

class SuperOffloadOptimizer_Stage3(DeepSpeedZeroOptimizer_Stage3):
    """Derives from the stage-3 class of the time at which it is imported first."""
