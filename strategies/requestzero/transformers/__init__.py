"""``RequestZeROTrainingArguments``: transformers' ``Trainer``, and what derives from it, with request-safe ZeRO."""

from __future__ import annotations

from requestzero.transformers.training_arguments import RequestZeROTrainingArguments

__all__ = ["RequestZeROTrainingArguments"]
