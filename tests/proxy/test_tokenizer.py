"""Exact token counts: by a tokenizer that the test trains, off the event loop, bounded, and with a way without them."""

import asyncio
import json
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from pdrouter.core.tokens import TextShape, TokenEstimator
from pdrouter.errors import ConfigError
from pdrouter.proxy.bodies import Api
from pdrouter.proxy.listener import CannotListen
from pdrouter.proxy.tokenizer import Tokenizer, count_tokens, load_tokenizer
from pdrouter.server import running
from tests.lab import CHAT, COMPLETIONS, Lab, chat, get, make_lab, make_settings, post, start, until

tokenizers = pytest.importorskip("tokenizers")

TEXT = 'Prefill reads "prompts";\n\tdecode writes answers. Ranks hold 128 blocks. \u4f60\u597d, \U0001f600!'


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a byte-level tokenizer of 400 tokens that would cut texts off."""
    path = tmp_path_factory.mktemp("model")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=16)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.fixture
def tokenizer(folder: Path) -> Tokenizer:
    """Return it, as the router reads it."""
    return load_tokenizer(folder)


def tokens_of(tokenizer: Any, text: str) -> int:
    """Return the tokens of a text."""
    return len(tokenizer.encode(text, add_special_tokens=False).ids)


def body_of(**fields: object) -> bytes:
    """Return a body."""
    return json.dumps(fields).encode()


def test_a_text_has_its_tokens(tokenizer: Tokenizer) -> None:
    """Of what was meant, not of its JSON, and however long it is."""
    long = TEXT * 50
    expected = tokens_of(tokenizer, long)
    assert expected > 500
    for body in (
        body_of(prompt=long),
        json.dumps({"prompt": long}, ensure_ascii=False).encode(),
        body_of(prompt=[long]),
    ):
        assert count_tokens(tokenizer, Api.COMPLETIONS, body) == TextShape.counted(expected, 1)
    assert count_tokens(tokenizer, Api.GENERATE, body_of(text=long)).size == expected


def test_a_conversation_has_the_tokens_of_its_pieces(tokenizer: Tokenizer) -> None:
    """Roles, contents, parts and tools, each for itself; tools as they are written."""
    tools = [{"type": "function", "function": {"name": "f"}}]
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = [{"role": "system", "content": TEXT}, {"role": "user", "content": parts}]
    pieces = ["system", TEXT, "user", "one", "two", json.dumps(tools)]
    shape = count_tokens(tokenizer, Api.CHAT, body_of(messages=messages, tools=tools))
    assert shape == TextShape.counted(sum(tokens_of(tokenizer, piece) for piece in pieces), 6)


def test_what_a_template_adds_is_learned() -> None:
    """A few counts are enough to know what stands around each message and around all of them."""
    estimator = TokenEstimator(4.0, 4)
    assert estimator.estimate("m", TextShape.counted(1000, 8)) == 1000

    def told(tokens: int, messages: int) -> int:
        return tokens + 4 * messages + 21

    for number in range(12):
        tokens, messages = 50 + 970 * number % 3000, 1 + number * 5 % 7
        estimator.learn("m", TextShape.counted(tokens, 2 * messages), told(tokens, messages))
    for tokens, messages in ((300, 1), (300, 20), (500, 4), (8000, 30)):
        estimate = estimator.estimate("m", TextShape.counted(tokens, 2 * messages))
        assert estimate == pytest.approx(told(tokens, messages), rel=0.02)
    assert estimator.estimate("m", 4000) == 1000  # texts by their bytes are learned of apart


def test_a_counted_text_may_be_empty() -> None:
    """A template alone has tokens."""
    assert TokenEstimator(4.0, 4).estimate(None, TextShape.counted(0, 2)) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), (b"{}", "is no tokenizer.json"), (b"\xff", "is no tokenizer.json")],
)
def test_a_file_that_is_none_stops_the_start(tmp_path: Path, content: bytes | None, message: str) -> None:
    """With the file's name."""
    file = tmp_path / "tokenizer.json"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        load_tokenizer(file)
    assert str(file) in str(caught.value)


def test_a_missing_library_stops_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says what to install."""
    monkeypatch.setitem(__import__("sys").modules, "tokenizers", None)
    with pytest.raises(ConfigError, match=r"pip install 'pdrouter\[tokenizer\]'"):
        load_tokenizer(folder)


async def test_a_bad_tokenizer_stops_a_router(tmp_path: Path) -> None:
    """Before it listens."""
    with pytest.raises(ConfigError, match="tokenizer_path"):
        async with running(make_settings({"worker": ["http://127.0.0.1:9"], "tokenizer_path": [str(tmp_path)]})):
            raise CannotListen


class Slow:
    """A tokenizer that waits until it is let go, and fails if asked to."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.may_end = threading.Event()
        self.fails = False

    def encode_batch_fast(self, texts: Sequence[str], /, *, add_special_tokens: bool) -> Sequence[Sequence[object]]:
        """Take a thread's time."""
        assert not add_special_tokens
        self.began.set()
        self.may_end.wait(10)
        if self.fails:
            raise OSError("no such text")
        return [[0] * 77]


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    """Return the tokenizer that all files hold; it is let go at the end."""
    slow = Slow()
    monkeypatch.setattr("pdrouter.proxy.tokenizer.load_tokenizer", lambda _: slow)
    yield slow
    slow.may_end.set()


def counts(lab: Lab) -> dict[str, int]:
    """Return what the router says of its counting, without what is nought."""
    counter = lab.router.service.counter
    assert counter is not None
    return {event: count for event, count in counter.counters().items() if count}


def prompt_tokens(lab: Lab, request_id: str) -> int:
    """Return what a request was taken for."""
    return lab.core.journal.story(request_id, 0.0)[-1].prompt_tokens


ID = {"x-request-id": "mine"}


async def test_a_request_is_placed_by_its_exact_count(folder: Path, tokenizer: Tokenizer) -> None:
    """The decision knows the number; the answer is as without a tokenizer, streamed or not."""
    async with make_lab(tokenizer_path=[str(folder)]) as lab:
        for is_stream in (False, True):
            body = {"model": "emulated", "prompt": TEXT * 30, "max_tokens": 4, "stream": is_stream}
            reply = await post(lab.url, COMPLETIONS, body, ID)
            assert (reply.status, reply.is_whole) == (200, True)
            if not is_stream:
                assert prompt_tokens(lab, "mine") == tokens_of(tokenizer, TEXT * 30)
        assert counts(lab) == {"counted": 2}
        assert 'pdrouter_tokenizer_total{event="counted"} 2' in (await get(lab.url, "/metrics")).body.decode()
        await until(lambda: lab.is_ledger_zero)


async def test_blocks_are_as_wide_as_the_count_says(folder: Path) -> None:
    """What is cached of a prompt is counted in the same tokens."""
    async with make_lab(tokenizer_path=[str(folder)], prefix_block_bytes=64, bytes_per_token=8) as lab:
        body = {"model": "emulated", "prompt": "x" * 4096, "max_tokens": 1}
        for _ in range(2):
            await post(lab.url, COMPLETIONS, body, ID)
        story = lab.core.journal.story("mine", 0.0)[-1]
        assert story.prompt_tokens == pytest.approx(1024, rel=0.05)  # as the engine has counted the first
        assert story.prompt_tokens - 32 < story.prefix_tokens < story.prompt_tokens


@pytest.mark.usefixtures("slow")
async def test_some_requests_are_estimated(slow: Slow) -> None:
    """Long ones, ids, batches; and nothing is counted of what isn't a prompt."""
    slow.may_end.set()
    async with make_lab(tokenizer_path=["emulated=/x", "other=/y"], tokenizer_max_bytes=2000) as lab:
        assert (await post(lab.url, CHAT, chat("word " * 500), ID)).status == 200
        assert counts(lab) == {"too_long": 1}
        await post(lab.url, COMPLETIONS, {"model": "emulated", "prompt": [1, 2], "max_tokens": 1})
        await post(lab.url, COMPLETIONS, {"model": "emulated", "prompt": ["a", "b"], "max_tokens": 1})
        assert (await post(lab.url, CHAT, chat("a", bootstrap_port="x")["messages"])).status == 400
        assert counts(lab) == {"too_long": 1}
        await post(lab.url, CHAT, chat("a"), ID)
        assert counts(lab) == {"too_long": 1, "counted": 1}
        assert prompt_tokens(lab, "mine") == 77


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize(("path", "is_counted"), [("emulated=/x", True), ("other=/x", False)])
async def test_a_request_is_counted_by_its_base_models_tokenizer(slow: Slow, path: str, is_counted: bool) -> None:
    """Whatever name it uses, or none; estimated where that model has no tokenizer."""
    slow.may_end.set()
    async with make_lab(tokenizer_path=[path]) as lab:
        for body in ({"model": "third", "prompt": "a"}, {"prompt": "a"}):
            await post(lab.url, COMPLETIONS, body | {"max_tokens": 1})
        assert counts(lab) == ({"counted": 2} if is_counted else {})


@pytest.mark.invariant("I9")
async def test_no_more_wait_than_are_allowed(slow: Slow) -> None:
    """One more is estimated at once, and passes those that wait."""
    async with make_lab(tokenizer_path=["/x"], tokenizer_threads=1, tokenizer_max_waiting=2) as lab:
        waiting = [await start(lab.url, CHAT, chat("a")) for _ in range(2)]
        await until(lambda: slow.began.is_set() and lab.router.service.metrics.in_flight == 2)
        assert (await post(lab.url, CHAT, chat("a"))).status == 200
        assert counts(lab) == {"too_many": 1}
        slow.may_end.set()
        for call in waiting:
            assert (await call.finish()).status == 200
            await call.leave()
        assert counts(lab) == {"too_many": 1, "counted": 2}
        await post(lab.url, CHAT, chat("a"))
        assert counts(lab) == {"too_many": 1, "counted": 3}


async def test_a_count_that_fails_is_no_failure(slow: Slow) -> None:
    """The estimate does."""
    slow.fails = True
    slow.may_end.set()
    async with make_lab(tokenizer_path=["/x"]) as lab:
        assert (await post(lab.url, CHAT, chat("word " * 100), ID)).status == 200
        assert counts(lab) == {"failed": 1}
        assert prompt_tokens(lab, "mine") == pytest.approx(125, rel=0.3)


async def test_a_client_that_leaves_while_it_waits_reaches_no_engine(slow: Slow) -> None:
    """Neither if it is its turn, nor if it was in the queue; nothing is held for it."""
    async with make_lab(tokenizer_path=["/x"], tokenizer_threads=1) as lab:
        calls = [await start(lab.url, CHAT, chat("a")) for _ in range(2)]
        await until(lambda: slow.began.is_set() and lab.router.service.metrics.in_flight == 2)
        for call in calls:
            await call.leave()
        await until(lambda: lab.router.service.metrics.in_flight == 0)
        slow.may_end.set()
        assert counts(lab) == {"left": 2}
        assert lab.core.decided == 0
        assert (await post(lab.url, CHAT, chat("a"))).status == 200
        assert lab.core.decided == 1


async def test_the_loop_runs_on_while_tokens_are_counted(folder: Path) -> None:
    """Other requests are answered meanwhile: counting takes no turn of the loop, and lets go of the interpreter."""
    async with make_lab(tokenizer_path=[str(folder)], tokenizer_max_bytes=10**8) as lab:
        call = await start(lab.url, COMPLETIONS, {"model": "emulated", "prompt": TEXT * 1000, "max_tokens": 1})
        await until(lambda: lab.router.service.metrics.in_flight == 1)
        turns = 0
        while not lab.core.decided:
            await asyncio.sleep(0)
            turns += 1
        assert turns > 100
        await call.leave()


async def test_a_router_ends_while_tokens_are_counted(slow: Slow) -> None:
    """What waits to be counted is given up."""
    async with make_lab(tokenizer_path=["/x"], tokenizer_threads=1, shutdown_grace_period_secs=0) as lab:
        calls = [await start(lab.url, CHAT, chat("a")) for _ in range(3)]
        await until(lambda: slow.began.is_set() and lab.router.service.metrics.in_flight == 3)
    slow.may_end.set()
    for call in calls:
        await call.leave()
