"""Exact token counts by a model's own tokenizer, in threads of their own: the event loop never waits for one.

A prompt that is too long, or that comes while too many wait, is estimated as without a tokenizer. Chat templates
aren't rendered: what they add is learned (``core/tokens.py``). It knows files and threads, not what is decided.
"""

import asyncio
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol, cast

import msgspec
from msgspec import Raw

from pdrouter.core.request import RequestFacts
from pdrouter.core.router import Router
from pdrouter.core.tokens import TextShape
from pdrouter.errors import ConfigError
from pdrouter.proxy.bodies import Api, decode
from pdrouter.proxy.client import Client
from pdrouter.proxy.offload import Offload
from pdrouter.proxy.prompts import read_prompt

_FILE = "tokenizer.json"

_TEXT, _TEXTS = b'"', b'["'
"""What raw JSON of a text begins with, and of a list of texts."""


GoOn = Callable[[RequestFacts | None], None]
"""What is called with the facts once a prompt was counted; with ``None`` if its client has left."""


class TokenizerOptions(msgspec.Struct, frozen=True):
    """Settings of the counting; ``config.py`` says what they mean. ``paths`` are by model, ``None``: all others."""

    paths: Mapping[str | None, Path]
    threads: int
    max_waiting: int
    max_bytes: int


class Tokenizer(Protocol):
    """What is used of ``tokenizers.Tokenizer``."""

    def encode_batch_fast(self, texts: Sequence[str], /, *, add_special_tokens: bool) -> Sequence[Sequence[object]]:
        """Return the tokens of each text; other threads run meanwhile, as they don't with ``encode``."""
        ...


class Counter:
    """Counts the prompts that are text and stand alone; ``counters`` says of how many it did, and why not of others."""

    def __init__(self, router: Router, options: TokenizerOptions) -> None:
        self._router = router
        self._options = options
        files = {path: load_tokenizer(path) for path in dict.fromkeys(options.paths.values())}
        self._tokenizers = {model: files[path] for model, path in options.paths.items()}
        self._threads = Offload("tokenizer", options.threads, options.max_waiting)
        self._counts = dict.fromkeys(("counted", "too_long", "too_many", "failed", "left"), 0)

    def counters(self) -> Mapping[str, int]:
        """Return what was counted so far."""
        return self._counts

    def count(self, facts: RequestFacts, api: Api, body: bytes, client: Client, go_on: GoOn) -> bool:
        """Let a prompt be counted, and ``go_on`` be called then; ``False`` where the estimate is to do."""
        names = (facts.model, self._router.base_model(facts), None)
        tokenizer = next((known for name in names if (known := self._tokenizers.get(name)) is not None), None)
        if tokenizer is None or facts.text is None:
            return False
        if len(body) > self._options.max_bytes:
            self._counts["too_long"] += 1
            return False
        work = partial(count_tokens, tokenizer, api, body)
        if not self._threads.start(work, client, partial(self._done, facts, go_on)):
            self._counts["too_many"] += 1
            return False
        return True

    def _done(self, facts: RequestFacts, go_on: GoOn, counting: "asyncio.Future[TextShape] | None") -> None:
        if counting is None:
            self._counts["left"] += 1
            go_on(None)
        elif counting.exception() is not None:
            self._counts["failed"] += 1
            go_on(facts)
        else:
            self._counts["counted"] += 1
            go_on(self._recounted(facts, counting.result()))

    def _recounted(self, facts: RequestFacts, text: TextShape) -> RequestFacts:
        tokens = self._router.tokens.estimate(self._router.base_model(facts), text)
        block_tokens = facts.block_tokens * tokens / facts.prompt_tokens
        return msgspec.structs.replace(facts, text=text, prompt_tokens=tokens, block_tokens=block_tokens)

    def close(self) -> None:
        """Count no more; what has begun comes to its end."""
        self._threads.close()


def count_tokens(tokenizer: Tokenizer, api: Api, body: bytes) -> TextShape:
    """Return the shape of a body's prompt, its tokens counted; texts as they are meant, tools as they are written."""
    raw = read_prompt(decode(api, body), 0).text
    texts: list[str] = []
    for piece in map(bytes, msgspec.json.decode(b"[%b]" % raw, type=list[Raw])):
        if piece.startswith(_TEXT):
            texts.append(msgspec.json.decode(piece, type=str))
        elif piece.startswith(_TEXTS):
            texts += msgspec.json.decode(piece, type=list[str])
        else:
            texts.append(piece.decode())
    encoded = tokenizer.encode_batch_fast(texts, add_special_tokens=False)
    return TextShape.counted(sum(map(len, encoded)), len(texts))


def load_tokenizer(path: Path) -> Tokenizer:
    """Read a tokenizer.json, or that of a folder.

    Raises: ConfigError.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # our threads are as many as are wanted
    try:
        library = importlib.import_module("tokenizers")
    except ImportError:
        raise ConfigError(["tokenizer_path needs the package tokenizers: pip install 'pdrouter[tokenizer]'"]) from None
    file = path / _FILE if path.is_dir() else path
    try:
        tokenizer = library.Tokenizer.from_buffer(file.read_bytes())
    except OSError as error:
        raise ConfigError([f"tokenizer_path: {file}: {error.strerror}"]) from error
    except ValueError as error:
        raise ConfigError([f"tokenizer_path: {file} is no {_FILE}: {error}"]) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return cast("Tokenizer", tokenizer)
