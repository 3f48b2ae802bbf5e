class LossScalerBase:
    def update_scale(self, overflow: bool) -> None:
        """Logs a line about an overflow, which is left out where requestzero tells more."""

class DynamicLossScaler(LossScalerBase):
    def update_scale(self, overflow: bool) -> None:
        """Raises a bare exception at the minimal loss scale, which is recognised by its text."""
