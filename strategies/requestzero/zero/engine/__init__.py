"""The engine that a caller drives: ``counters`` (read-outs), ``announcements`` (to the other ranks), ``engine``."""

from __future__ import annotations

from requestzero.zero.engine.engine import RequestZeROEngine

__all__ = ["RequestZeROEngine"]
