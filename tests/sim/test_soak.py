"""The soak: what counts as right, failed and wrong, and a short one of it all."""

import asyncio
import json
import random
import sys
from collections import Counter

import pytest
from tests.lab import make_lab

from pdrouter.sim.soak_client import Ask, Caller, End, Limits, Manner, Seen, judge, plan
from pdrouter.sim.soak_report import SoakResult, last_line, problem_lines, table

CHAT = "/v1/chat/completions"
ERROR = b'{"error":{"message":"gone","type":"server_error","code":"%b","param":null}}'


def ask(*, is_stream: bool = False, manner: Manner = Manner.WELL) -> Ask:
    """Return a request."""
    return Ask(CHAT, "hello", 4, is_stream, manner, 1.0)


def seen(body: bytes, *, status: int = 200, is_chunked: bool = False, is_whole: bool = True) -> Seen:
    """Return what came of an answer."""
    answer = Seen()
    answer.status, answer.is_chunked, answer.is_whole, answer.pieces = status, is_chunked, is_whole, [body]
    return answer


def plain(text: str) -> bytes:
    """Return a whole chat."""
    return json.dumps({"choices": [{"message": {"content": text}}]}).encode()


def event(text: str) -> bytes:
    """Return an event of a chat."""
    return b"data: " + json.dumps({"choices": [{"delta": {"content": text}}]}).encode() + b"\n\n"


RIGHT = ask().expected
DONE = b"data: [DONE]\n\n"
HALF = b'data: {"choi'


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        (seen(plain(RIGHT)), End("right")),
        (seen(plain(RIGHT[:-4])), End("wrong", "text")),
        (seen(plain("other")), End("wrong", "text")),
        (seen(plain(RIGHT)[:10], is_whole=False), End("failed", "cut off")),
        (seen(ERROR % b"upstream_closed", status=502), End("failed", "502 upstream_closed")),
        (seen(ERROR % b"internal_error", status=500), End("wrong", "internal_error")),
        (seen(ERROR % b"upstream_closed", status=502, is_whole=False), End("wrong", "an error that was cut off")),
        (seen(b'{"object":"error","message":"no","code":400}', status=400), End("failed", "engine's 400")),
    ],
)
def test_plain_answers(answer: Seen, end: End) -> None:
    """Right is the engine's own text; a failure is told by its cause; half an answer never looks whole."""
    assert judge(ask(), answer) == end


@pytest.mark.parametrize("status", [200, 502])
def test_what_is_not_json(status: int) -> None:
    """It is wrong."""
    assert judge(ask(), seen(b"oops", status=status)).kind == "wrong"


@pytest.mark.parametrize(
    ("body", "is_whole", "end"),
    [
        (event(RIGHT) + DONE, True, End("right")),
        (event(RIGHT[:4]) + event(RIGHT[4:]) + DONE, True, End("right")),
        (event(RIGHT[:4]) + DONE, True, End("wrong", "text is short")),
        (event("other") + DONE, True, End("wrong", "text")),
        (event(RIGHT), True, End("wrong", "a stream without its end")),
        (event(RIGHT), False, End("wrong", "cut off untold")),
        (
            event(RIGHT[:4]) + b"data: " + ERROR % b"upstream_closed" + b"\n\n",
            False,
            End("failed", "200 upstream_closed"),
        ),
        (HALF + b"\n\ndata: " + ERROR % b"upstream_closed" + b"\n\n", False, End("failed", "200 upstream_closed")),
        (event("other") + HALF + b"\n\ndata: " + ERROR % b"upstream_closed" + b"\n\n", False, End("wrong", "text")),
    ],
)
def test_streams(body: bytes, is_whole: bool, end: End) -> None:
    """A stream ends with [DONE], or with an error that is told; all before it is the beginning of the right text."""
    assert judge(ask(is_stream=True), seen(body, is_chunked=True, is_whole=is_whole)) == end


def test_the_plan_is_repeatable() -> None:
    """One seed gives the same requests; all manners are among them, and most behave well."""
    plans = [[plan(random.Random(f"1 {number}"), number) for number in range(300)] for _ in range(2)]
    assert plans[0] == plans[1]
    manners = Counter(ask.manner for ask in plans[0])
    assert set(manners) == set(Manner)
    assert manners[Manner.WELL] > 200


async def test_a_caller() -> None:
    """All manners of a client get the right answer of a good router, but those who leave before it."""
    async with make_lab(engine={"speed": 100.0}) as lab:
        caller = Caller(int(lab.url.rpartition(":")[2]), Limits(5.0))
        plans = [plan(random.Random(f"2 {number}"), number) for number in range(60)]
        ends = await asyncio.gather(*(caller.call(ask) for ask in plans))
        caller.close()
        for ask, end in zip(plans, ends, strict=True):
            assert end == End("right") or (end.kind == "left" and ask.manner is Manner.LEAVES), ask
        await lab.settled()


def test_the_verdict() -> None:
    """It is good when something was right and nothing wrong, left behind, or grown; the last line says so."""
    result = SoakResult()
    assert not result.is_ok
    for end in (End("right"), End("failed", "502 upstream_closed"), End("left")):
        result.add(end)
    result.rss_bytes = (100, 110)
    assert last_line(result) == "soak: ok requests=3 wrong=0 leaked=0"
    assert table(result).row_count > 5
    result.rss_bytes = (100, 111)
    assert not result.is_ok
    result.rss_bytes = None
    result.leak(2, "open files")
    result.add(End("wrong", "text"))
    assert last_line(result) == "soak: failed requests=4 wrong=1 leaked=2"
    assert problem_lines(result) == ["wrong, 1 times: text", "2 left: open files"]


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.invariant("I2")
async def test_half_a_minute() -> None:
    """Under mixed faults and deaths of engines no answer is wrong, and nothing is left."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "pdrouter.sim.soak", "--seconds", "30", "--rate", "80"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await process.communicate()
    told = out.decode()
    assert process.returncode == 0, told
    assert told.splitlines()[-1].startswith("soak: ok requests=")
    assert told.splitlines()[-1].endswith(" wrong=0 leaked=0")
