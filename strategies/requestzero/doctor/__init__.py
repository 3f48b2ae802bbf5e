"""``python -m requestzero.doctor [CONFIG]``: check the installation, and a config against stock DeepSpeed.

Light on purpose: DeepSpeed is loaded when the diagnosis is made.
"""
