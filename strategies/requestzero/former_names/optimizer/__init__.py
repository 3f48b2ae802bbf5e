"""Former name of :mod:`requestzero.zero`."""
