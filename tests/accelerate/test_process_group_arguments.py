"""Arguments of a process group that exists already are an error, not passed over."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
import torch
from accelerate.utils import InitProcessGroupKwargs

from requestzero.accelerate.checks import check_arguments


@pytest.mark.parametrize("given", [{"timeout": timedelta(seconds=77)}, {"init_method": "env://"}])
def test_arguments_that_come_too_late(monkeypatch: pytest.MonkeyPatch, given: dict[str, Any]) -> None:
    arguments = {"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo", **given)]}
    check_arguments(arguments, {})
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    with pytest.raises(ValueError, match=r"InitProcessGroupKwargs\(timeout=.*comes too late.*leave the handler out"):
        check_arguments(arguments, {})
    check_arguments({"kwargs_handlers": [InitProcessGroupKwargs(backend="gloo")]}, {})
