"""``python -m requestzero.probe``: requestzero against stock DeepSpeed, measured on this machine.

One measurement a file: ``updates``, ``precision``, ``memory``, ``costs`` (with ``counters``), ``timing``. ``grid``
lists the configurations, ``measure`` runs them on one rank, ``ranks`` starts the ranks, ``run`` is all of it. Output:
``columns``, ``reference``, ``table``, ``files``, ``figure``, ``page``.
"""
