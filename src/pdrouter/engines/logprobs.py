"""Joins the prompt's logprobs: the prefill leg has them, the decode leg answers the client.

The prefill leg's lists go before the decode leg's, whole or streamed; all other bytes stay as they came (I10).
Source: SGLang's ``meta_info`` of ``/generate`` with ``return_logprob``, and the choices of ``/v1/completions`` with
``echo`` and ``logprobs`` (``entrypoints/openai/serving_completions.py``).
"""

from collections.abc import Iterator, Mapping, Sequence

import msgspec

from pdrouter.errors import UpstreamProtocol

Raw = msgspec.Raw
_Object = dict[str, Raw]
_MAX_INDEX_DIGITS = 9

MERGED_FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")
CHOICE_FIELDS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
"""Lists of a completion's choice: of a prefill the prompt's, and behind them those of the one token that it makes.

Source: SGLang's ``to_openai_style_logprobs`` (``openai/utils.py``), ``disaggregation/prefill.py``; seen on 0.5.23.
"""

_Lists = Mapping[str, bytes]


def prompt_logprobs(reply: bytes, *, is_stream: bool) -> Mapping[int, _Lists]:
    """Return a prefill reply's raw logprob lists by sample; what isn't understood is left out."""
    objects = enumerate(_samples(reply)) if not is_stream else ((None, event) for event in _stream_objects(reply))
    found: dict[int, dict[str, bytes]] = {}
    for position, sample in objects:
        for index, lists in _prompt_lists(sample, position):
            for field, raw in lists.items():
                if raw.startswith(b"[") and len(raw) >= len(found.setdefault(index, {}).get(field, b"")):
                    found[index][field] = raw
    return found


def _prompt_lists(sample: _Object, position: int | None) -> Iterator[tuple[int, _Lists]]:
    """Yield what a prefill tells, by sample; ``position`` is the sample's place in a list."""
    if "choices" not in sample:
        meta = _object(sample.get("meta_info"))
        index = _index(sample) if position is None else position
        yield index, {field: bytes(meta[field]) for field in MERGED_FIELDS if field in meta}
        return
    for choice in _choices(sample):
        logprobs = _object(choice.get("logprobs"))
        lists = {field: _items(logprobs[field]) for field in CHOICE_FIELDS if field in logprobs}
        prompt_tokens = max(0, len(lists.get("tokens", ())) - 1)
        yield _index(choice), {field: _array(items[:prompt_tokens]) for field, items in lists.items()}


def merge_reply(reply: bytes, prompt: Mapping[int, _Lists]) -> bytes:
    """Return a whole decode reply with the prompt's logprobs put first."""
    samples = _samples(reply)
    merged = [_merge_sample(sample, prompt, i) for i, sample in enumerate(samples)]
    if not any(merged):
        return reply
    whole = [after or _write(before) for before, after in zip(samples, merged, strict=True)]
    return whole[0] if reply.lstrip().startswith(b"{") else b"[" + b",".join(whole) + b"]"


class StreamMerger:
    """Rewrites a decode leg's events as they come; at most one unfinished event is held (I9)."""

    def __init__(self, prompt: Mapping[int, _Lists], max_event_bytes: int) -> None:
        self._prompt = dict(prompt)
        self._max_event_bytes = max_event_bytes
        self._rest = b""

    def feed(self, piece: bytes) -> bytes:
        """Return the events that ``piece`` completes.

        Raises: UpstreamProtocol for an event that is too long.
        """
        *events, self._rest = (self._rest + piece).split(b"\n\n")
        if len(self._rest) > self._max_event_bytes:  # I9
            raise UpstreamProtocol(f"a stream event exceeds {self._max_event_bytes} bytes")
        return b"".join(self._merge_event(event) + b"\n\n" for event in events)

    def finish(self) -> bytes:
        """Return what is left at the end of the stream."""
        rest, self._rest = self._rest, b""
        return rest

    def _merge_event(self, event: bytes) -> bytes:
        sample = _event_object(event) if self._prompt else None
        merged = None if sample is None else _merge_sample(sample, self._prompt, _index(sample))
        if sample is None or merged is None:
            return event
        for choice in _choices(sample):  # a completion's event tells what is new; the prompt is told once
            if _object(choice.get("logprobs")):
                self._prompt.pop(_index(choice), None)
        return b"data: " + merged


def _samples(reply: bytes) -> list[_Object]:
    try:
        decoded = msgspec.json.decode(reply, type=_Object | list[_Object])
    except (msgspec.MsgspecError, RecursionError):
        return []
    return decoded if isinstance(decoded, list) else [decoded]


def _stream_objects(stream: bytes) -> Iterator[_Object]:
    for event in stream.split(b"\n\n"):
        sample = _event_object(event)
        if sample is not None:
            yield sample


def _event_object(event: bytes) -> _Object | None:
    if not event.startswith(b"data:"):
        return None
    try:
        return msgspec.json.decode(event[5:], type=_Object)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _object(raw: Raw | None) -> _Object:
    """Return an object's fields; anything else has none."""
    try:
        return msgspec.json.decode(raw or b"{}", type=_Object)
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _choices(sample: _Object) -> list[_Object]:
    try:
        return msgspec.json.decode(sample.get("choices", b"[]"), type=list[_Object])
    except (msgspec.MsgspecError, RecursionError):
        return []


def _items(raw: Raw) -> Sequence[Raw]:
    """Return a list's items; anything else has none."""
    try:
        return msgspec.json.decode(raw, type=list[Raw])
    except (msgspec.MsgspecError, RecursionError):
        return []


def _array(items: Sequence[Raw]) -> bytes:
    return b"[" + b",".join(map(bytes, items)) + b"]"


def _index(sample: _Object) -> int:
    raw = bytes(sample.get("index", b"0"))
    return int(raw) if raw.isdigit() and len(raw) < _MAX_INDEX_DIGITS else 0


def _merge_sample(sample: _Object, prompt: Mapping[int, _Lists], index: int) -> bytes | None:
    """Return an answer with its prompt's logprobs put first, ``None`` where there is nothing to put."""
    if "choices" not in sample:
        joined = _joined(sample.get("meta_info"), prompt.get(index))
        return None if joined is None else _write({**sample, "meta_info": joined})
    choices = _choices(sample)
    merged = [_joined(choice.get("logprobs"), prompt.get(_index(choice))) for choice in choices]
    if not any(merged):
        return None
    written = [
        Raw(_write(choice if joined is None else {**choice, "logprobs": joined}))
        for choice, joined in zip(choices, merged, strict=True)
    ]
    return _write({**sample, "choices": Raw(_array(written))})


def _joined(holder: Raw | None, lists: _Lists | None) -> Raw | None:
    """Return the object of an answer's logprobs with the prompt's in front; ``None`` if one of both isn't there."""
    own = _object(holder)
    if not lists or not own:
        return None
    joined = {field: Raw(_concatenate(raw, bytes(own.get(field, b"[]")))) for field, raw in lists.items()}
    return Raw(_write({**own, **joined}))


def _write(fields: _Object) -> bytes:
    return b"{" + b",".join(msgspec.json.encode(k) + b":" + bytes(v) for k, v in fields.items()) + b"}"


def _concatenate(first: bytes, second: bytes) -> bytes:
    """Join two raw JSON arrays; anything but an array counts as an empty one."""
    inner = [raw.strip()[1:-1].strip() for raw in (first, second) if raw.strip().startswith(b"[")]
    return b"[" + b",".join(part for part in inner if part) + b"]"
