"""``RequestZeROTrainingArguments``: transformers' ``Trainer``, and what derives from it, with request-safe ZeRO."""

from __future__ import annotations

from requestzero.environment.ranges import require_allowed

require_allowed("accelerate", "transformers")  # first: other versions may lack what is imported below

from requestzero.transformers.training_arguments import RequestZeROTrainingArguments  # noqa: E402

__all__ = ["RequestZeROTrainingArguments"]
