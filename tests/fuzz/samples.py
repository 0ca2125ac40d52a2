"""Answers of several samples joined: however they are cut and whichever comes first, each sample says the same.

Nothing is lost, doubled or moved to another sample, whatever the engines say; the bodies of the samples ask for one.
"""

from collections.abc import Sequence

import msgspec
from msgspec import Raw

from pdrouter.engines.samples import StreamJoiner, join_replies, one_sample_body
from pdrouter.errors import DuplicateField, UpstreamProtocol
from tests.fuzz.source import Source, anything, array, either, number, record, text, word

MOST_BYTES = 1 << 20
LITTLE_BYTES = 300

Fields = dict[str, Raw]

_COUNT = either(number, word(b"0", b"1", b"2", b"123456789012345", b"1234567890123456", b"-1", b"1.5", b"null", b'"5"'))
_DETAILS = record(reasoning_tokens=_COUNT, cached_tokens=_COUNT)
_USAGE = record(
    prompt_tokens=_COUNT,
    completion_tokens=_COUNT,
    total_tokens=_COUNT,
    reasoning_tokens=_COUNT,
    completion_tokens_details=either(word(b"null"), _DETAILS),
    prompt_tokens_details=_DETAILS,
)
_CHOICE = record(index=_COUNT, delta=anything, text=text, finish_reason=text, logprobs=anything)
_EXTENSIONS = record(output_ids=array(array(_COUNT)), spec_tokens_details=_DETAILS, input_ids=array(_COUNT))
_CHUNK = record(choices=array(_CHOICE), usage=_USAGE, sglext=_EXTENSIONS, object=text)
_CLOSING = record(choices=word(b"[]", b"[ ]"), usage=_USAGE, sglext=_EXTENSIONS)
_ANSWER = record(text=text, index=_COUNT, meta_info=record(prompt_tokens=_COUNT, id=text))
_ERROR = record(error=either(word(b"null"), record(message=text)))
_EVENT = either(_CHUNK, _CHUNK, _ANSWER, _CLOSING, _ERROR, anything)
_STARTS = (b"data: ", b"data: ", b"data:", b"event: x\ndata: ", b": ping", b"")
_ENDS = (b"\n\n", b"\n\n", b"\n\n", b"\r\n\r\n", b"\n", b"\n\n\n", b"")
_BODY = record(
    n=either(_COUNT, text), seed=number, prompt=text, sampling_params=word(b'{"n":2,"top_p":1.0}', b'[{"n":2},{}]')
)


def one_input(raw: bytes) -> None:
    """Join the streams of some samples whole and cut, their whole replies, and make their bodies."""
    source = Source(raw)
    kind = source.below(8)
    if kind == 0:
        hold_bodies(source)
    elif kind < 3:
        hold_replies([reply(source) for _ in range(1 + source.below(4))])
    else:
        streams = [stream(source) for _ in range(1 + source.below(4))]
        hold_streams(streams, in_turns(source, [source.pieces(raw) for raw in streams]))


def stream(source: Source) -> bytes:
    """Write a stream of events, most of them good."""
    if source.once_in(16):
        return source.rest()
    written = [
        source.pick(_STARTS) + source.spoilt(_EVENT(source)) + source.pick(_ENDS) for _ in range(source.below(5))
    ]
    return b"".join(written) + source.pick((b"data: [DONE]\n\n", b""))


def reply(source: Source) -> bytes:
    """Write a whole reply, most often a good one."""
    return source.spoilt(either(_CHUNK, _CHUNK, _ANSWER, array(_ANSWER), anything)(source))


def in_turns(source: Source, pieces: Sequence[Sequence[bytes]]) -> list[tuple[int, bytes]]:
    """Return all pieces, those of each sample in order."""
    left = {sample: list(those) for sample, those in enumerate(pieces) if those}
    order = []
    while left:
        sample = source.pick(list(left))
        order.append((sample, left[sample].pop(0)))
        if not left[sample]:
            del left[sample]
    return order


def joined(count: int, pieces: Sequence[tuple[int, bytes]], most_bytes: int) -> tuple[list[bytes], bytes, bool]:
    """Return what comes of each sample, what ends the stream, and whether a sample has failed."""
    joiner = StreamJoiner(count, most_bytes)
    said = [b""] * count
    for sample, piece in pieces:
        said[sample] += joiner.feed(sample, piece)
    for sample in range(count):
        said[sample] += joiner.end(sample)
    return said, joiner.finish(), joiner.has_failed


def hold_streams(streams: Sequence[bytes], pieces: Sequence[tuple[int, bytes]]) -> None:
    """Each event comes out once, with its number, as it is else; only closing ones come last."""
    count = len(streams)
    whole = joined(count, list(enumerate(streams)), MOST_BYTES)
    assert joined(count, pieces, MOST_BYTES) == whole
    said, end, has_failed = whole
    asked_to_end = False
    errors = 0
    for sample, raw in enumerate(streams):
        expected = b""
        for event in raw.split(b"\n\n"):
            start, data = data_of(event)
            fields = fields_of(data)
            asked_to_end |= data == b"[DONE]"
            errors += fields.get("error", Raw(b"null")) != Raw(b"null")
            said_of_it = renumbered(fields, sample, count)
            if data == b"[DONE]" or not event.strip() or said_of_it is None:
                continue
            expected += (event if said_of_it is fields else start + b"data: " + raw_object(said_of_it)) + b"\n\n"
        assert said[sample] == expected
    assert has_failed is bool(errors)
    assert end.endswith(b"data: [DONE]\n\n") is asked_to_end
    try:
        joined(count, pieces, LITTLE_BYTES)
    except UpstreamProtocol as error:
        assert str(LITTLE_BYTES) in error.message  # noqa: PT017 - it need not be raised


def data_of(event: bytes) -> tuple[bytes, bytes]:
    """Return what stands before an event's data, and the data."""
    lines = event.split(b"\n")
    at = next((at for at, line in enumerate(lines) if line.startswith(b"data:")), None)
    if at is None:
        return event, b""
    start = b"".join(line + b"\n" for line in lines[:at])
    return start, event[len(start) + 5 :].strip()


def fields_of(data: bytes) -> Fields:
    """Return an object's fields, none of anything else."""
    try:
        return msgspec.json.decode(data, type=Fields)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}


def objects_of(data: bytes) -> list[Fields]:
    """Return a list of objects."""
    try:
        return msgspec.json.decode(data, type=list[Fields])
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []


def renumbered(fields: Fields, sample: int, count: int) -> Fields | None:
    """Return what becomes of an event's object: itself, another, or ``None`` where it comes last."""
    if fields.get("error", Raw(b"null")) != Raw(b"null"):
        return fields
    if "choices" in fields:
        choices = objects_of(bytes(fields["choices"]))
        if not choices:
            return None
        written = [raw_object(with_number(choice, sample, count)) for choice in choices]
        return {**fields, "choices": Raw(b"[" + b",".join(written) + b"]")}
    return with_number(fields, sample, count) if "meta_info" in fields else fields


def with_number(fields: Fields, sample: int, count: int) -> Fields:
    """Return an object with its number among all samples."""
    raw = bytes(fields.get("index", b""))
    prompt = int(raw) if raw.isdigit() and len(raw) <= 15 else 0
    return {**fields, "index": Raw(b"%d" % (prompt * count + sample))}


def raw_object(fields: Fields) -> bytes:
    """Return an object as it is written."""
    return b"{" + b",".join(msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in fields.items()) + b"}"


def raw_of(fields: Fields) -> dict[str, bytes]:
    """Return what can be compared."""
    return {name: bytes(raw) for name, raw in fields.items()}


def hold_replies(replies: Sequence[bytes]) -> None:
    """All choices are there, in order of their numbers; what isn't understood is refused."""
    try:
        whole = join_replies(replies)
    except UpstreamProtocol:
        return
    count = len(replies)
    first = fields_of(replies[0])
    if "choices" in first:
        choices = objects_of(bytes(fields_of(whole)["choices"]))
        asked = [
            with_number(choice, sample, count)
            for sample, raw in enumerate(replies)
            for choice in objects_of(bytes(fields_of(raw)["choices"]))
        ]
        assert sorted(map(raw_object, choices)) == sorted(map(raw_object, asked))
        numbers = [int(bytes(choice["index"])) for choice in choices]
        assert numbers == sorted(numbers)
        changed = {"choices", "usage", "sglext"}
        kept = {name: raw for name, raw in raw_of(fields_of(whole)).items() if name not in changed}
        assert kept == {name: raw for name, raw in raw_of(first).items() if name not in changed}
    else:
        told = [[fields_of(raw)] if raw.lstrip().startswith(b"{") else objects_of(raw) for raw in replies]
        in_order = [raw_of(answer) for of_prompt in zip(*told, strict=True) for answer in of_prompt]
        assert [raw_of(answer) for answer in objects_of(whole)] == in_order


def hold_bodies(source: Source) -> None:
    """Nothing of a body changes but ``n``."""
    body = _BODY(source)
    fields = fields_of(body)
    if not fields:
        return
    try:
        one = one_sample_body(body, is_generate=False)
    except DuplicateField:
        return
    assert raw_of(fields_of(one)) == {name: raw for name, raw in raw_of(fields).items() if name != "n"}
    given = bytes(fields.get("sampling_params", b""))
    if not fields_of(given) and not objects_of(given):  # the intake has refused it
        return
    try:
        one = one_sample_body(body, is_generate=True)
    except DuplicateField:
        return
    params = bytes(fields_of(one)["sampling_params"])
    told = objects_of(params) or [fields_of(params)]
    assert not any("n" in each for each in told)
    others = set(fields) - {"sampling_params"}
    assert {name: bytes(fields_of(one)[name]) for name in others} == {name: bytes(fields[name]) for name in others}
