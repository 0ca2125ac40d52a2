"""Joins the prompt's logprobs: the prefill leg has them, the decode leg answers the client.

The prefill leg's lists go before the decode leg's, whole or streamed; all other bytes stay as they came (I10).
Source: SGLang's ``meta_info`` of ``/generate`` with ``return_logprob``.
"""

from collections.abc import Iterator, Mapping

import msgspec

from pdrouter.errors import UpstreamProtocol

Raw = msgspec.Raw
_Object = dict[str, Raw]
_MAX_INDEX_DIGITS = 9

MERGED_FIELDS = ("input_token_logprobs", "input_top_logprobs", "input_token_ids_logprobs")


def prompt_logprobs(reply: bytes, *, is_stream: bool) -> Mapping[int, Mapping[str, bytes]]:
    """Return a prefill reply's raw logprob lists by sample; what isn't understood is left out."""
    objects = enumerate(_samples(reply)) if not is_stream else ((None, event) for event in _stream_objects(reply))
    found: dict[int, dict[str, bytes]] = {}
    for position, sample in objects:
        meta = _meta_info(sample)
        index = _index(sample) if position is None else position
        for field in MERGED_FIELDS:
            raw = bytes(meta.get(field, b""))
            if raw.startswith(b"[") and len(raw) >= len(found.setdefault(index, {}).get(field, b"")):
                found[index][field] = raw
    return found


def merge_reply(reply: bytes, prompt: Mapping[int, Mapping[str, bytes]]) -> bytes:
    """Return a whole decode reply with the prompt's logprobs put first."""
    samples = _samples(reply)
    merged = [_merge_sample(sample, prompt.get(i, {})) for i, sample in enumerate(samples)]
    if not any(merged):
        return reply
    whole = [after or _write(before) for before, after in zip(samples, merged, strict=True)]
    return whole[0] if reply.lstrip().startswith(b"{") else b"[" + b",".join(whole) + b"]"


class StreamMerger:
    """Rewrites a decode leg's events as they come; at most one unfinished event is held (I9)."""

    def __init__(self, prompt: Mapping[int, Mapping[str, bytes]], max_event_bytes: int) -> None:
        self._prompt = prompt
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
        sample = _event_object(event)
        merged = None if sample is None else _merge_sample(sample, self._prompt.get(_index(sample), {}))
        return event if merged is None else b"data: " + merged


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


def _meta_info(sample: _Object) -> _Object:
    try:
        return msgspec.json.decode(sample.get("meta_info", b"{}"), type=_Object)
    except (msgspec.MsgspecError, RecursionError):
        return {}


def _index(sample: _Object) -> int:
    raw = bytes(sample.get("index", b"0"))
    return int(raw) if raw.isdigit() and len(raw) < _MAX_INDEX_DIGITS else 0


def _merge_sample(sample: _Object, prompt: Mapping[str, bytes]) -> bytes | None:
    """Return a sample with the prompt's logprobs put first, ``None`` where there is nothing to put."""
    meta = _meta_info(sample)
    if not prompt or not meta:
        return None
    joined = {field: Raw(_concatenate(raw, bytes(meta.get(field, b"[]")))) for field, raw in prompt.items()}
    return _write({**sample, "meta_info": Raw(_write({**meta, **joined}))})


def _write(fields: _Object) -> bytes:
    return b"{" + b",".join(msgspec.json.encode(k) + b":" + bytes(v) for k, v in fields.items()) + b"}"


def _concatenate(first: bytes, second: bytes) -> bytes:
    """Join two raw JSON arrays; anything but an array counts as an empty one."""
    inner = [raw.strip()[1:-1].strip() for raw in (first, second) if raw.strip().startswith(b"[")]
    return b"[" + b",".join(part for part in inner if part) + b"]"
