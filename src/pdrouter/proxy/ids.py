"""[1][4] What must be new: request ids, and for each attempt a suffix and rooms.

From one generator that the kernel seeded: a system call each would cost more than all the rest of this file.
"""

from random import Random

from pdrouter.engines.base import Attempt

_LETTERS = 24
_ROOM_BITS = 63
_SUFFIX_BITS = 64


class Ids:
    """A source of new ids; they are unlikely to meet another router's, and no secret."""

    def __init__(self, chance: Random) -> None:
        self._bits = chance.getrandbits
        self.fraction = chance.random

    def letters(self) -> str:
        """Return 24 letters and digits for a request id."""
        return f"{self._bits(4 * _LETTERS):0{_LETTERS}x}"

    def attempt(self, samples: int) -> Attempt:
        """Return a new suffix, and a room for each sample."""
        bits = self._bits
        return Attempt(f"{bits(_SUFFIX_BITS):016x}", [bits(_ROOM_BITS) for _ in range(samples)])
