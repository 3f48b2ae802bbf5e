"""The names of the requests that were applied last, so that none is applied twice (``begin_request(once=True)``)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from requestzero.data.micro_batch import RequestId

KEPT = 10_000


class AppliedRequests:
    """The last :data:`KEPT` names of requests whose window was applied, the same on all ranks."""

    def __init__(self) -> None:
        self._ids: OrderedDict[RequestId, None] = OrderedDict()

    def __contains__(self, request_id: RequestId) -> bool:
        return request_id in self._ids

    def note(self, request_ids: Iterable[RequestId]) -> None:
        """Note the names of an applied window's requests; those without one are not noted."""
        for request_id in request_ids:
            if request_id is not None:
                self._ids[request_id] = None
                self._ids.move_to_end(request_id)
        while len(self._ids) > KEPT:
            self._ids.popitem(last=False)

    def state_dict(self) -> dict[str, Any]:
        """Return plain containers, so that a checkpoint can be read without this package."""
        return {"request_ids": list(self._ids)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what :meth:`state_dict` gave; nothing is known for an empty mapping (DeepSpeed's own checkpoint)."""
        self._ids.clear()
        self.note(state.get("request_ids", ()))
