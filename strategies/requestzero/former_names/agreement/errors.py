"""Former place of :class:`requestzero.RankDisagreementError`."""

from requestzero.former_names import moved

moved(__name__, "requestzero.errors")
