"""Former name of :mod:`requestzero.environment.machine`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.environment.machine")
