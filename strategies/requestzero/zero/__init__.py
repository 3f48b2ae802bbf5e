"""The request-safe ZeRO optimizer and its engine.

- ``initialization``: build an engine; ``engine/``: what a caller drives.
- ``common/``: parts that no ZeRO stage owns: the update window, rollback of a request, the divisor, the loss scale
  and norm of a step, streams.
- ``overflow/``: gradients that are not finite: skips, their messages, their origin.
- ``stage_1_and_2/``: ZeRO 1 and 2: the way of a gradient from its hook into the window's sum, and the thin subclass of
  DeepSpeed's optimizer whose methods delegate to these parts.
- ``window_checkpoint/``: the open window in checkpoints, and folders that are written as a whole.
- ``upstream/``: adapters for older releases of DeepSpeed.
"""
