"""An open loop: moments, what is late, what is cut off."""

import asyncio
from collections.abc import Sequence

import pytest

from pdrouter.sim.replay.caller import Ask, Caller, Seen
from pdrouter.sim.replay.player import Played, Player
from pdrouter.sim.virtual.trace import Request


class Endpoint(Caller):
    """Answers when it is told to, and knows how many wait."""

    def __init__(self) -> None:
        self.waiting = 0
        self.most = 0
        self.is_enough = 0
        self.enough = asyncio.Event()
        self.go_on = asyncio.Event()

    async def ask(self, ask: Ask) -> Seen:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        if self.waiting >= self.is_enough:
            self.enough.set()
        await self.go_on.wait()
        self.waiting -= 1
        return Seen()


def make_ask(number: int, request: Request) -> Ask:
    """Return what is asked."""
    return Ask(model="m", prompt=str(number), output_tokens=request.output_tokens)


def requests(count: int, gap_s: float = 0.001) -> Sequence[Request]:
    """Return requests in equal distances."""
    return [Request(number * gap_s, 10, 5) for number in range(count)]


async def play(endpoint: Endpoint, player: Player, stop: asyncio.Event, *, answer: bool) -> Played:
    """Play until enough wait; then answer all, or stop."""
    playing = asyncio.create_task(player.play(stop, lambda sent: None))
    async with asyncio.timeout(5):
        await endpoint.enough.wait()
        (endpoint.go_on if answer else stop).set()
        return await playing


async def test_arrivals_wait_for_nobody() -> None:
    """All are sent while not one was answered; times count from when they were due."""
    endpoint = Endpoint()
    endpoint.is_enough = 20
    player = Player(endpoint, requests(20), make_ask, 100, 1.0)
    played = await play(endpoint, player, asyncio.Event(), answer=True)
    assert endpoint.most == 20
    assert (len(played.sent), played.held, played.cut) == (20, 0, 0)
    for sent in played.sent:
        assert sent.due_s == pytest.approx(played.start_s + sent.request.at_s)
        assert sent.sent_s >= sent.due_s


async def test_speed() -> None:
    """Moments come as many times as fast."""
    endpoint = Endpoint()
    endpoint.is_enough = 10
    played = await play(
        endpoint, Player(endpoint, requests(10, 10.0), make_ask, 9999, 1e5), asyncio.Event(), answer=True
    )
    assert max(sent.due_s for sent in played.sent) == pytest.approx(played.start_s + 90 / 1e5)


@pytest.mark.invariant("I9")
async def test_the_limit_is_kept_and_told() -> None:
    """No more than may be are under way, and those that had to wait are late and counted."""
    endpoint = Endpoint()
    endpoint.is_enough = 3
    player = Player(endpoint, requests(10, 0.0), make_ask, 3, 1.0)
    played = await play(endpoint, player, asyncio.Event(), answer=True)
    assert endpoint.most == 3
    assert played.held >= 1
    assert len(played.sent) == 10
    last = max(played.sent, key=lambda sent: sent.number)
    assert last.sent_s > last.due_s


async def test_a_stop_cuts_off() -> None:
    """Those under way are counted, those that were to come aren't sent."""
    endpoint = Endpoint()
    endpoint.is_enough = 5
    player = Player(endpoint, [*requests(5), Request(1e6, 1, 1)], make_ask, 100, 1.0)
    played = await play(endpoint, player, asyncio.Event(), answer=False)
    assert (len(played.sent), played.cut) == (0, 5)
    assert endpoint.most == 5


async def test_a_fault_of_its_own_is_not_kept_quiet() -> None:
    """It ends the replay."""

    def make(number: int, request: Request) -> Ask:
        raise ZeroDivisionError

    with pytest.raises(ExceptionGroup):
        await Player(Endpoint(), requests(3), make, 5, 1.0).play(asyncio.Event(), lambda sent: None)
