"""Former name of :mod:`requestzero.config.options_table`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.config.options_table")
