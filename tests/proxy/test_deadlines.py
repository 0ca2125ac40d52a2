"""Time limits under one timer."""

import asyncio

from pdrouter.proxy.deadlines import Deadlines
from tests.lab import until


async def test_whatever_waits_too_long_expires_in_order() -> None:
    """Items expire in the order in which they came, each once, and none that was taken out."""
    expired: list[int] = []
    deadlines = Deadlines(0.05, expired.append)
    for item in range(6):
        deadlines.put(item)
    for item in (0, 3, 5, 7):
        deadlines.take_out(item)
    await until(lambda: len(expired) == 3)
    assert expired == [1, 2, 4]


async def test_never_too_early() -> None:
    """Whatever came later has its whole time, though the timer was set for another."""
    loop = asyncio.get_running_loop()
    expired: dict[str, float] = {}
    deadlines: Deadlines[str] = Deadlines(0.1, lambda item: expired.update({item: loop.time()}))
    deadlines.put("first")
    deadlines.take_out("first")
    await asyncio.sleep(0.06)
    began_s = loop.time()
    deadlines.put("second")
    await until(lambda: "second" in expired)
    assert set(expired) == {"second"}
    assert expired["second"] - began_s >= 0.098


async def test_expiring_may_change_what_waits() -> None:
    """An item that ends others takes them out; one that comes back waits again."""
    expired: list[str] = []

    def expire(item: str) -> None:
        expired.append(item)
        deadlines.take_out("friend")
        if len(expired) == 1:
            deadlines.put("again")

    deadlines = Deadlines(0.02, expire)
    deadlines.put("one")
    deadlines.put("friend")
    await until(lambda: len(expired) == 2)
    assert expired == ["one", "again"]
