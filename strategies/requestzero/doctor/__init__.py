"""``python -m requestzero.doctor [CONFIG]``: whether this installation fits, and what stock DeepSpeed does to a config.

Light on purpose: DeepSpeed is loaded when the diagnosis is made.
"""
