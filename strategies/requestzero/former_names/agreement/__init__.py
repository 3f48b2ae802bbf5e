"""Former name of :mod:`requestzero.rank_check`."""
