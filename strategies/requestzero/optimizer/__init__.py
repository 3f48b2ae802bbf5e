"""The request-safe ZeRO-1/2 optimizer and its engine, as subclasses of DeepSpeed's.

Read in this order: ``window`` (the state of an update window), ``device_sum`` and ``host_sum`` (where the running sum
of the window lives, on the device and under CPU offload), ``grad_norm`` (norm, overflow verdict, division), then
``zero_optimizer`` (the life cycle of a window) and ``engine`` (what a caller drives). ``swap`` puts the classes in
DeepSpeed's place for one construction.
"""
