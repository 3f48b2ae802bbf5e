"""Former name of :mod:`requestzero.config.reference_table`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.config.reference_table")
