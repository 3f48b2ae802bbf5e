"""The running sum of a window, one accumulator for each parameter group.

``accumulator`` is what all of them do, ``gradient_sums`` all groups together and the choice among them: ``device``
(flat, on the accelerator), ``muon`` (whole matrices, on the accelerator), ``host`` (CPU offload: in the gradient that
the optimizer reads), ``offloaded`` (CPU offload with fp32 sums of a 16-bit model: on the accelerator within a request,
on the host between requests).
"""
