"""``python -m requestzero.doctor --verify``: a self-test on this machine and with these versions.

``configurations`` lists what is run, ``updates`` compares random windows with plain PyTorch, ``life_cycle`` what comes
between windows, ``gpu`` (in ``slow_windows``) and ``gpu_probe`` what only a GPU has; ``plan`` says on which ranks,
``run`` starts them, ``result`` is printed.
"""
