"""Former name of :mod:`requestzero.data.collate`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.data.collate")
