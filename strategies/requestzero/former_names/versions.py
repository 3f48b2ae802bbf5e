"""Former name of :mod:`requestzero.environment.versions`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.environment.versions")
