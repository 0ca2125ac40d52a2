"""Joins the prompt's logprobs: the prefill leg has them, the decode leg answers the client.

The prefill leg's lists go before the decode leg's, whole or streamed; all other bytes stay as they came (I10).
Source: SGLang's ``meta_info`` of ``/generate`` with ``return_logprob``, and the choices of ``/v1/completions`` with
``echo`` and ``logprobs`` (``entrypoints/openai/serving_completions.py``).
"""

from collections.abc import Iterator, Mapping

from msgspec import Raw

from pdrouter.engines.raw_json import (
    Fields,
    read_count,
    read_items,
    read_object,
    read_objects,
    write_list,
    write_object,
)
from pdrouter.engines.sse import END, EventSplitter, split_data

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


def _prompt_lists(sample: Fields, position: int | None) -> Iterator[tuple[int, _Lists]]:
    """Yield what a prefill tells, by sample; ``position`` is the sample's place in a list."""
    if "choices" not in sample:
        meta = read_object(sample.get("meta_info", b""))
        index = _index(sample) if position is None else position
        yield index, {field: bytes(meta[field]) for field in MERGED_FIELDS if field in meta}
        return
    for choice in _choices(sample):
        logprobs = read_object(choice.get("logprobs", b""))
        lists = {field: read_items(logprobs[field]) for field in CHOICE_FIELDS if field in logprobs}
        prompt_tokens = max(0, len(lists.get("tokens", ())) - 1)
        yield _index(choice), {field: bytes(write_list(items[:prompt_tokens])) for field, items in lists.items()}


def merge_reply(reply: bytes, prompt: Mapping[int, _Lists]) -> bytes:
    """Return a whole decode reply with the prompt's logprobs put first."""
    samples = _samples(reply)
    merged = [_merge_sample(sample, prompt, i) for i, sample in enumerate(samples)]
    if not any(merged):
        return reply
    whole = [after or write_object(before) for before, after in zip(samples, merged, strict=True)]
    return bytes(whole[0] if reply.lstrip().startswith(b"{") else write_list(whole))


class StreamMerger:
    """Rewrites a decode leg's events as they come; at most one unfinished event is held (I9)."""

    def __init__(self, prompt: Mapping[int, _Lists], max_event_bytes: int) -> None:
        self._prompt = dict(prompt)
        self._splitter = EventSplitter(max_event_bytes)

    def feed(self, piece: bytes) -> bytes:
        """Return the events that ``piece`` completes.

        Raises: UpstreamProtocol for an event that is too long.
        """
        return b"".join([self._merge_event(event) + END for event in self._splitter.feed(piece)])

    def finish(self) -> bytes:
        """Return what is left at the end of the stream."""
        return self._splitter.finish()

    def _merge_event(self, event: bytes) -> bytes:
        if not self._prompt:
            return event
        start, data = split_data(event)
        sample = read_object(data)
        merged = _merge_sample(sample, self._prompt, _index(sample))
        if merged is None:
            return event
        for choice in _choices(sample):  # a completion's event tells what is new; the prompt is told once
            if read_object(choice.get("logprobs", b"")):
                self._prompt.pop(_index(choice), None)
        return start + b"data: " + merged


def _samples(reply: bytes) -> list[Fields]:
    return [read_object(reply)] if reply.lstrip().startswith(b"{") else read_objects(reply)


def _stream_objects(stream: bytes) -> Iterator[Fields]:
    for event in stream.split(END):
        _, data = split_data(event)
        if data:
            yield read_object(data)


def _choices(sample: Fields) -> list[Fields]:
    return read_objects(sample.get("choices", b""))


def _index(sample: Fields) -> int:
    return read_count(sample.get("index")) or 0


def _merge_sample(sample: Fields, prompt: Mapping[int, _Lists], index: int) -> Raw | None:
    """Return an answer with its prompt's logprobs put first, ``None`` where there is nothing to put."""
    if "choices" not in sample:
        joined = _joined(sample.get("meta_info"), prompt.get(index))
        return None if joined is None else write_object({**sample, "meta_info": joined})
    choices = _choices(sample)
    merged = [_joined(choice.get("logprobs"), prompt.get(_index(choice))) for choice in choices]
    if not any(merged):
        return None
    written = [
        write_object(choice if joined is None else {**choice, "logprobs": joined})
        for choice, joined in zip(choices, merged, strict=True)
    ]
    return write_object({**sample, "choices": write_list(written)})


def _joined(holder: Raw | None, lists: _Lists | None) -> Raw | None:
    """Return the object of an answer's logprobs with the prompt's in front; ``None`` if one of both isn't there."""
    own = read_object(holder or b"")
    if not lists or not own:
        return None
    joined = {field: _concatenate(raw, bytes(own.get(field, b""))) for field, raw in lists.items()}
    return write_object({**own, **joined})


def _concatenate(first: bytes, second: bytes) -> Raw:
    """Join two raw JSON arrays; anything but an array counts as an empty one."""
    inner = [raw.strip()[1:-1].strip() for raw in (first, second) if raw.strip().startswith(b"[")]
    return write_list(part for part in inner if part)
