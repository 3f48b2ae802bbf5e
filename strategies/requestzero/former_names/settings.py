"""Former name of :mod:`requestzero.config.settings`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.config.settings")
