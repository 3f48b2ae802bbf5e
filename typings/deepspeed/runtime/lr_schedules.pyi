class WarmupLR:
    last_batch_iteration: int
    """-1 before the first step: the learning rate is the one of step 0."""

    def step(self, last_batch_iteration: int | None = None) -> None: ...

class WarmupCosineLR:
    last_batch_iteration: int

    def step(self, last_batch_iteration: int | None = None) -> None: ...
