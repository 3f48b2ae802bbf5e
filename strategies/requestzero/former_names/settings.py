"""Former name of :mod:`requestzero.config.options`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.config.options")
