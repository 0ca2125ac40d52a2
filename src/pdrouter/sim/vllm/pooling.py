"""vLLM's endpoints that generate nothing: embeddings, scores, classes, tokens. Answers are pure functions of the texts.

They take no time and no KV, and know no ranks: only their formats matter here.
"""

import time
import uuid
from collections.abc import Awaitable, Callable

import msgspec

from pdrouter.sim.emulator_kind import Handler, Routes
from pdrouter.sim.emulator_settings import EmulatorSettings, EngineError
from pdrouter.sim.faults import FaultRule
from pdrouter.sim.http_exchange import Exchange
from pdrouter.sim.text import Prompt, render_chat

_DIMENSIONS = 8
_CLASSES = 2


class _Body(msgspec.Struct, frozen=True):
    model: str | None = None
    input: str | list[str] | None = None
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    query: str | None = None
    documents: list[str] | None = None
    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    tokens: list[int] | None = None


_decoder = msgspec.json.Decoder(_Body)


class Pooling:
    """Handlers of one server."""

    def __init__(self, settings: EmulatorSettings, count_error: Callable[[EngineError], None]) -> None:
        self._settings = settings
        self._count_error = count_error

    def routes(self) -> Routes:
        """Handlers by path and method."""
        answers = {
            "/v1/embeddings": self._embeddings,
            "/v1/rerank": self._rerank,
            "/rerank": self._rerank,
            "/v1/score": self._score,
            "/v1/classify": self._classify,
            "/tokenize": self._tokenize,
            "/detokenize": self._detokenize,
            "/v1/messages/count_tokens": self._count_tokens,
        }
        return {path: {"POST": self._handler(answer)} for path, answer in answers.items()}

    def _handler(self, answer: Callable[[_Body], dict[str, object]]) -> Handler:
        async def handle(exchange: Exchange, _rules: list[FaultRule]) -> None:
            try:
                shown = answer(_decoder.decode(await exchange.read()))
            except msgspec.MsgspecError as problem:
                error = EngineError(400, "bad_request", str(problem))
            except EngineError as problem:
                error = problem
            else:
                await exchange.reply_json(200, shown)
                return
            self._count_error(error)
            await exchange.fail(error)

        typed: Callable[[Exchange, list[FaultRule]], Awaitable[None]] = handle
        return typed

    def _prompt(self, text: str) -> Prompt:
        return Prompt(text, self._settings.bytes_per_token)

    def _answer(self, kind: str, texts: list[str], **fields: object) -> dict[str, object]:
        tokens = sum(self._prompt(text).tokens for text in texts)
        usage = {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0, "prompt_tokens_details": None}
        head = {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self._settings.model}
        return head | fields | {"usage": usage}

    def _embeddings(self, body: _Body) -> dict[str, object]:
        texts = _texts(body.input, "input")
        data = [
            {"index": i, "object": "embedding", "embedding": [self._share(text, k) for k in range(_DIMENSIONS)]}
            for i, text in enumerate(texts)
        ]
        return self._answer("embd", texts, object="list", data=data)

    def _rerank(self, body: _Body) -> dict[str, object]:
        query, documents = _texts(body.query, "query")[0], _texts(body.documents, "documents")
        scores = [self._share(query + text, 0) for text in documents]
        results = [
            {"index": i, "document": {"text": documents[i]}, "relevance_score": scores[i]}
            for i in sorted(range(len(documents)), key=scores.__getitem__, reverse=True)
        ]
        return self._answer("rerank", [query, *documents], results=results)

    def _score(self, body: _Body) -> dict[str, object]:
        left, right = _texts(body.text_1, "text_1"), _texts(body.text_2, "text_2")
        if len(left) not in {1, len(right)}:
            raise EngineError(400, "bad_request", "text_1 must be one text or as many as text_2")
        pairs = [(left[i if len(left) > 1 else 0], text) for i, text in enumerate(right)]
        data = [{"index": i, "object": "score", "score": self._share(a + b, 0)} for i, (a, b) in enumerate(pairs)]
        return self._answer("score", [*left, *right], object="list", data=data)

    def _classify(self, body: _Body) -> dict[str, object]:
        texts = _texts(body.input, "input")
        data = []
        for i, text in enumerate(texts):
            first = self._share(text, 0)
            probabilities = [first, 1 - first]
            label = f"LABEL_{probabilities.index(max(probabilities))}"
            data.append({"index": i, "label": label, "probs": probabilities, "num_classes": _CLASSES})
        return self._answer("classify", texts, object="list", data=data)

    def _tokenize(self, body: _Body) -> dict[str, object]:
        text = render_chat(body.messages) if body.messages else _texts(body.prompt, "prompt")[0]
        raw, size = text.encode(), self._settings.bytes_per_token
        tokens = [int.from_bytes(raw[i : i + size]) for i in range(0, len(raw), size)]
        return {"count": len(tokens), "max_model_len": 1 << 20, "tokens": tokens, "token_strs": None}

    def _count_tokens(self, body: _Body) -> dict[str, object]:
        """Source: vLLM 0.32, ``entrypoints/anthropic/protocol.py``, ``AnthropicCountTokensResponse``."""
        if not body.messages:
            raise EngineError(400, "bad_request", "messages must be a list of messages")
        return {"input_tokens": self._prompt(render_chat(body.messages)).tokens}

    def _detokenize(self, body: _Body) -> dict[str, object]:
        if body.tokens is None:
            raise EngineError(400, "bad_request", "tokens must be a list of integers")
        size = self._settings.bytes_per_token
        try:
            raw = b"".join(token.to_bytes(size).lstrip(b"\0") for token in body.tokens)
        except OverflowError:
            raise EngineError(400, "bad_request", "a token is out of range") from None
        return {"prompt": raw.decode(errors="replace")}

    def _share(self, text: str, index: int) -> float:
        return ((self._prompt(text).digest >> (8 * index)) & 0xFF) / 256


def _texts(value: str | list[str] | None, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not texts:
        raise EngineError(400, "bad_request", f"{name} must be a text or a list of texts")
    return texts
