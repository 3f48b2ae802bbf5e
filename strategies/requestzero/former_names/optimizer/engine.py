"""Former place of :class:`requestzero.zero.engine.RequestZeROEngine`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.zero.engine")
