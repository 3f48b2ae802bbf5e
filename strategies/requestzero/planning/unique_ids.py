"""Find ids that are given twice."""

from __future__ import annotations

from collections.abc import Sequence


def repeated_places(ids: Sequence[str | int]) -> dict[int, int]:
    """Return, for each place whose id stands at an earlier place too, the first such place.

    Makes two passes over ``ids`` and, while it runs, holds 8 bytes for each, a hash; only ids whose hash is not unique
    are compared. Nothing is kept where all ids differ.
    """
    import numpy as np

    if isinstance(ids, range):
        return {}
    hashes = np.fromiter((hash(name) for name in ids), dtype=np.int64, count=len(ids))
    hashes.sort()
    suspects = set(hashes[1:][hashes[1:] == hashes[:-1]].tolist())
    if not suspects:
        return {}
    first: dict[tuple[type, str | int], int] = {}
    repeated: dict[int, int] = {}
    for place, name in enumerate(ids):
        if hash(name) in suspects:
            earlier = first.setdefault((type(name), name), place)
            if earlier != place:
                repeated[place] = earlier
    return repeated
