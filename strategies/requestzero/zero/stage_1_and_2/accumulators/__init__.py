"""The running sum of a window, one accumulator for each parameter group.

``accumulator`` is the interface, ``gradient_sums`` all groups together, ``choice`` picks one for each group:

- on the accelerator: ``device`` (a flat partition), ``muon`` (whole matrices);
- under CPU offload (``offload_base``): ``offload_host_gradient`` (added into the gradient that the optimizer reads),
  ``offload_partition`` (fp32 sums of a 16-bit model: on the accelerator within a request, kept or freed between
  requests as ``retention`` says).
"""
