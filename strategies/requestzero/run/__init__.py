"""``python -m requestzero.run PROGRAM``: a program for Accelerate, Transformers or DeepSpeed, unchanged, request-safe.

- ``program``: run a script or module as ``python`` does.
- ``after_import``: act when the program has imported a module, and not before.
- ``adoption``: what becomes request-safe.
"""
