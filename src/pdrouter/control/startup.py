"""The start: the port opens when each endpoint was asked once, so that the first requests aren't refused for nothing.

An endpoint that refuses connections has failed at once, one that is silent when its probe's time is over.
"""

import asyncio
from collections.abc import Callable

import structlog

from pdrouter.control.members import Members

_LOOK_S = 0.01
"""Time between two looks whether the round is over; chosen."""

_MAX_NAMED = 8
"""Endpoints that are named one by one."""


async def first_round(members: Members, within_s: float, is_stopped: Callable[[], bool]) -> None:
    """Wait until each member has answered or failed once; for ``within_s`` at most, and no longer than until a stop."""
    loop = asyncio.get_running_loop()
    until_s = loop.time() + within_s
    while (waiting := members.not_asked()) and loop.time() < until_s and not is_stopped():  # noqa: ASYNC110 - plain state
        await asyncio.sleep(_LOOK_S)
    if waiting and within_s > 0 and not is_stopped():
        log = structlog.stdlib.get_logger("pdrouter.startup")
        log.warning(
            "the port opens before all endpoints were asked (worker_startup_timeout_secs)",
            not_ready=waiting[:_MAX_NAMED],
            count=len(waiting),
        )
