"""Former name of :mod:`requestzero.data.packing`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.data.packing")
