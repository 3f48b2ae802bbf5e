"""Former name of :mod:`requestzero.data.request_loader`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.data.request_loader")
