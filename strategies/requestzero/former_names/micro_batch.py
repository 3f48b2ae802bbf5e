"""Former name of :mod:`requestzero.data.micro_batch`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.data.micro_batch")
