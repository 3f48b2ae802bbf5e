"""``python -m requestzero.probe``: requestzero against stock DeepSpeed, measured on this machine.

One measurement a file: ``updates``, ``precision``, ``memory``, ``costs`` (with ``counters``), ``timing``. ``grid`` says
which configurations, ``measure`` runs them on one rank, ``ranks`` starts the ranks. What is shown where: ``columns``,
``reference``, ``table``, ``files``, ``figure``, ``page``.
"""
