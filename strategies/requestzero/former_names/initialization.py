"""Former name of :mod:`requestzero.zero.initialization`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.zero.initialization")
