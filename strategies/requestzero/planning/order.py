"""The order of requests in an epoch, without a list of them."""

from __future__ import annotations

import hashlib

_ROUNDS = 6
_MIX = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)  # of the generator splitmix64
_WORD = (1 << 64) - 1


class RequestOrder:
    """A permutation of ``range(size)`` that follows from ``(seed, epoch)`` and is kept as a few integers.

    A balanced Feistel network permutes the numbers of the next larger power of 4; numbers beyond ``size`` are sent
    through it again until they fall below (cycle walking, fewer than four rounds on average).

    Args:
        size: number of requests.
        seed: chooses the permutations.
        epoch: chooses one of them.
        shuffle: false gives ``0, 1, 2, ...``.
    """

    def __init__(self, size: int, seed: int, epoch: int, shuffle: bool = True) -> None:
        self.size = size
        self.shuffle = shuffle
        self._half = max(1, ((size - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(f"{seed}-{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
        self._keys = [int.from_bytes(digest[8 * n : 8 * n + 8], "little") for n in range(_ROUNDS)]

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, place: int) -> int:
        """Return the request at ``place``.

        Raises:
            IndexError: ``place`` is not in ``range(size)``.
        """
        if not 0 <= place < self.size:
            raise IndexError(f"There is no place {place} in an order of {self.size} requests.")
        if not self.shuffle:
            return place
        index = self._permuted(place)
        while index >= self.size:
            index = self._permuted(index)
        return index

    def _permuted(self, number: int) -> int:
        mask = (1 << self._half) - 1
        left, right = number >> self._half, number & mask
        for key in self._keys:
            left, right = right, left ^ (_mixed(right + key) & mask)
        return (left << self._half) | right


def _mixed(value: int) -> int:
    value &= _WORD
    value = ((value ^ (value >> 30)) * _MIX[0]) & _WORD
    value = ((value ^ (value >> 27)) * _MIX[1]) & _WORD
    return value ^ (value >> 31)
