"""Former name of :mod:`requestzero.data.planned_loader`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.data.planned_loader")
