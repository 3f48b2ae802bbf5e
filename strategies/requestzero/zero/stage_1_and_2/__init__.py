"""ZeRO 1 and 2.

The way of a gradient: ``local_gradients`` (where it waits on its parameter), ``gradient_reduction`` (when it is
reduced), ``bucket`` (filling), ``bucket_collective`` (the collective), ``bucket_runs`` and ``layout`` (what this rank
owns of it), ``accumulators/`` (the window's sum: on the device, on the host, or offloaded between requests).
``optimizer`` owns them.
"""
