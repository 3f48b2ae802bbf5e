"""Former name of :mod:`requestzero.data.labels`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.data.labels")
