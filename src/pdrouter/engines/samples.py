"""``n`` > 1 as ``n`` requests: the body of each, and their answers joined into the one that the client asked for.

SGLang's decode engines hang on ``n`` > 1, so each sample is a request of its own. Sample k of prompt j has the index
``j * n + k``. All else keeps its bytes (I10). Source: SGLang 0.5.23: ``managers/tokenizer_manager.py``
(``_handle_batch_request``: the order of samples, one seed for all), ``entrypoints/openai/usage_processor.py``,
``serving_chat.py`` and ``serving_completions.py``. It does no I/O; ``proxy/samples.py`` runs the requests.
"""

from collections.abc import Iterable, Sequence
from itertools import zip_longest

import msgspec
from msgspec import Raw

from pdrouter.engines.base import rest_without, splice
from pdrouter.engines.raw_json import (
    Fields,
    read_count,
    read_items,
    read_object,
    read_objects,
    write_list,
    write_object,
)
from pdrouter.engines.sse import DONE, END, EventSplitter, split_data
from pdrouter.errors import UpstreamProtocol

_N = frozenset({"n"})
_PARAMS = "sampling_params"
_NULL = Raw(b"null")

_SUMMED = ("completion_tokens", "reasoning_tokens", "completion_tokens_details")
"""What ``usage`` counts of all samples; of the prompt it counts the first sample's."""

_SHARED = ("id", "created")
"""What is the same in all chunks of a stream. Source: OpenAI's API reference, the chat completion chunk object."""


class _Generate(msgspec.Struct):
    sampling_params: Raw = _NULL


def one_sample_body(body: bytes, *, is_generate: bool) -> bytes:
    """Return a body that asks for one answer to each prompt.

    Raises: DuplicateField if ``n`` or ``sampling_params`` stands twice.
    """
    if not is_generate:
        return b"{" + rest_without(body, _N)
    params = bytes(msgspec.json.decode(body, type=_Generate).sampling_params)
    if params.startswith(b"["):
        params = bytes(write_list(b"{" + rest_without(bytes(item), _N) for item in read_items(params)))
    else:
        params = b"{" + rest_without(params, _N)
    return b"".join(splice(rest_without(body, {_PARAMS}), b'"sampling_params":' + params))


def join_replies(replies: Sequence[bytes]) -> bytes:
    """Return one reply of whole ones, a reply for each sample.

    Raises: UpstreamProtocol for one that isn't understood.
    """
    objects = [[read_object(reply)] if reply.lstrip().startswith(b"{") else read_objects(reply) for reply in replies]
    is_completion = "choices" in objects[0][0] if objects[0] else False
    name = "choices" if is_completion else "meta_info"
    for sample, told in enumerate(objects):
        if len(told) != len(objects[0]) or not told or any(name not in answer for answer in told):
            raise UpstreamProtocol(f"the answer of sample {sample} of {len(replies)} isn't understood")
    if is_completion:
        return bytes(_joined([told[0] for told in objects]))
    return bytes(write_list(write_object(told) for of_prompt in zip(*objects, strict=True) for told in of_prompt))


class StreamJoiner:
    """Joins the streams of ``count`` samples as they come.

    What ends a completion's stream (usage) is held until all samples have ended; of that and of unfinished events
    there may be ``max_bytes`` (I9). ``has_failed``: a sample has told an error.
    """

    __slots__ = ("_closing", "_count", "_held_bytes", "_is_done", "_max_bytes", "_shared", "_splitters", "has_failed")

    def __init__(self, count: int, max_bytes: int) -> None:
        self.has_failed = False
        self._count = count
        self._max_bytes = max_bytes
        self._held_bytes = 0
        self._is_done = False
        self._shared: Fields = {}
        self._splitters = [EventSplitter(max_bytes) for _ in range(count)]
        self._closing: list[list[tuple[bytes, Fields]]] = [[] for _ in range(count)]

    def feed(self, sample: int, piece: bytes) -> bytes:
        """Return the client's events for a piece of a sample's stream.

        Raises: UpstreamProtocol if more is held than may be.
        """
        splitter = self._splitters[sample]
        before_bytes = splitter.held_bytes
        events = splitter.feed(piece)
        self._hold(splitter.held_bytes - before_bytes)
        return b"".join([self._event(sample, event) for event in events])

    def end(self, sample: int) -> bytes:
        """Return what is left of a sample's stream at its end."""
        rest = self._splitters[sample].finish()
        self._held_bytes -= len(rest)
        return self._event(sample, rest)

    def finish(self) -> bytes:
        """Return what ends the client's stream."""
        ending = b""
        if not self.has_failed:
            for told in zip_longest(*self._closing):
                closing = [pair for pair in told if pair is not None]
                ending += closing[0][0] + b"data: " + _joined([fields for _, fields in closing]) + END
        return ending + (b"data: " + DONE + END if self._is_done else b"")

    def _event(self, sample: int, event: bytes) -> bytes:
        start, data = split_data(event)
        if data == DONE:
            self._is_done = True
            return b""
        fields = read_object(data)
        if fields.get("error", _NULL) != _NULL:
            self.has_failed = True
        elif "choices" in fields:
            self._share(fields)
            choices = read_objects(fields["choices"])
            if not choices:
                self._hold(len(event))
                self._closing[sample].append((start, fields))
                return b""
            fields["choices"] = write_list(write_object(self._numbered(choice, sample)) for choice in choices)
            return start + b"data: " + write_object(fields) + END
        elif "meta_info" in fields:
            return start + b"data: " + write_object(self._numbered(fields, sample)) + END
        return event + END if event.strip() else b""

    def _numbered(self, fields: Fields, sample: int) -> Fields:
        return _numbered(fields, sample, self._count)

    def _share(self, fields: Fields) -> None:
        for name in _SHARED:
            if name in fields:
                fields[name] = self._shared.setdefault(name, fields[name])

    def _hold(self, size_bytes: int) -> None:
        self._held_bytes += size_bytes
        if self._held_bytes > self._max_bytes:  # I9
            raise UpstreamProtocol(f"{self._count} streams hold more than {self._max_bytes} bytes of unfinished events")


def _numbered(fields: Fields, sample: int, count: int) -> Fields:
    """Return a choice, or an event of ``/generate``, with its index among all samples of all prompts."""
    prompt = read_count(fields.get("index")) or 0
    return {**fields, "index": Raw(b"%d" % (prompt * count + sample))}


def _joined(objects: Sequence[Fields]) -> Raw:
    """Return completions of one request, a completion for each sample, as one; the rest is the first one's."""
    joined, count = dict(objects[0]), len(objects)
    choices = [
        _numbered(choice, sample, count)
        for sample, told in enumerate(objects)
        for choice in read_objects(told.get("choices", b""))
    ]
    choices.sort(key=lambda choice: read_count(choice["index"]) or 0)
    joined["choices"] = write_list(map(write_object, choices))
    for name, join in (("usage", _joined_usage), ("sglext", _joined_extensions)):
        told = [fields for each in objects if (fields := read_object(each.get(name, b"")))]
        if told:
            joined[name] = join(told)
    return write_object(joined)


def _joined_usage(usages: Sequence[Fields]) -> Raw:
    """Return a usage that counts each prompt once, and all answers."""
    joined = dict(usages[0])
    for name in _SUMMED:
        told = [usage[name] for usage in usages if usage.get(name, _NULL) != _NULL]
        if told:
            joined[name] = _sum(told)
    counts = [read_count(joined.get(name)) for name in ("prompt_tokens", "completion_tokens")]
    if "total_tokens" in joined:
        joined["total_tokens"] = Raw(b"%d" % sum(count or 0 for count in counts))
    return write_object(joined)


def _sum(raws: Sequence[Raw]) -> Raw:
    """Return the sum of numbers, or of objects the sum of each field."""
    objects = [fields for raw in raws if (fields := read_object(raw))]
    if not objects:
        return Raw(b"%d" % sum(read_count(raw) or 0 for raw in raws))
    names = dict.fromkeys(name for fields in objects for name in fields)
    sums = {name: sum(read_count(fields.get(name)) or 0 for fields in objects) for name in names}
    return write_object({name: b"%d" % total for name, total in sums.items()})


def _joined_extensions(extensions: Sequence[Fields]) -> Raw:
    """Return SGLang's ``sglext``: what it tells of the request once, and what it tells of each sample."""
    joined = dict(extensions[0])
    output_ids = [told["output_ids"] for told in extensions if "output_ids" in told]
    if output_ids:
        joined["output_ids"] = write_list(_chained(output_ids))
    details = [told["spec_tokens_details"] for told in extensions if "spec_tokens_details" in told]
    if details:
        joined["spec_tokens_details"] = write_list(details)
    return write_object(joined)


def _chained(lists: Iterable[Raw]) -> Iterable[Raw]:
    return (item for raw in lists for item in read_items(raw))
