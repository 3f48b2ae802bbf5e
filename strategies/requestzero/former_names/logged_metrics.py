"""Former name of :mod:`requestzero.zero.metrics`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.zero.metrics")
