"""What clients may ask: bodies of each inference path, good and spoilt, with headers; and how JSON reads elsewhere."""

import json
from collections.abc import Collection, Mapping, Sequence

from pdrouter.proxy.bodies import Api
from tests.fuzz.source import Shape, Source, anything, array, either, flag, number, record, text, word

Headers = Sequence[tuple[bytes, bytes]]
Pairs = list[tuple[str, object]]

_COUNT = either(number, word(b"1", b"2", b"16", b"4096", b"4097", b"null", b'"2"', b"2.0", b"-1", b"true", b'"1_6"'))
_FLAG = either(flag, word(b'"true"', b'"off"', b"1", b"0.0", b'"maybe"'))
_IDS = array(number, word(b"1", b"22", b"333"))
_PROMPT = either(text, _IDS, array(text), array(_IDS), anything)
_MEDIUM = either(
    record(type=word(b'"image_url"'), image_url=anything),
    record(type=word(b'"input_audio"'), input_audio=anything, text=text),
    record(type=word(b'"image"', b'"document"'), source=record(type=word(b'"base64"', b'"text"'), data=text)),
)
_INNER = either(record(type=word(b'"text"'), text=text), _MEDIUM, record(type=word(b'"tool_use"'), input=anything))
_PART = either(
    record(type=word(b'"text"'), text=text),
    _MEDIUM,
    record(type=word(b'"tool_result"', b'"function_call_output"'), content=either(text, array(_INNER)), output=_INNER),
)
_MESSAGE = record(
    role=word(b'"user"', b'"system"', b'"developer"', b'"assistant"'),
    content=either(text, array(_PART), anything),
    tool_calls=either(word(b"null"), array(anything)),
)
_RANKS = {
    name: either(word(b"null", b"0", b"1", b"-1"), anything)
    for name in (
        *("routed_dp_rank", "disagg_prefill_dp_rank", "data_parallel_rank"),
        *("data_parallel_rank_decode", "decode_dp_rank"),
    )
}
_SHARED: Mapping[str, Shape] = {
    "model": either(word(b'"m"', b'"other"', b"null"), text),
    "stream": _FLAG,
    "stream_options": record(include_usage=flag),
    "n": _COUNT,
    "best_of": _COUNT,
    "max_tokens": _COUNT,
    "max_completion_tokens": _COUNT,
    "min_tokens": _COUNT,
    "priority": either(word(b"0", b"-5", b"null"), number),
    "store": flag,
    "seed": number,
    "metadata": anything,
    "cache_salt": anything,
    "lora_path": text,
    "rid": either(text, array(text), anything),
    "bootstrap_room": anything,
    "bootstrap_host": anything,
    "kv_transfer_params": anything,
    "disaggregated_params": anything,
    "prompt_token_ids": _IDS,
}
_PROMPTS: Mapping[Api, Mapping[str, Shape]] = {
    Api.CHAT: {"messages": array(_MESSAGE), "tools": either(word(b"null"), array(anything))},
    Api.COMPLETIONS: {"prompt": _PROMPT},
    Api.GENERATE: {
        "text": either(text, array(text)),
        "input_ids": either(_IDS, array(_IDS)),
        "input_embeds": either(array(array(number)), array(array(array(number)))),
        "sampling_params": either(
            record(n=_COUNT, max_new_tokens=_COUNT), array(record(n=_COUNT, max_new_tokens=_COUNT))
        ),
        "image_data": either(text, array(text), array(array(text)), anything),
        "return_logprob": either(_FLAG, array(_FLAG)),
    },
    Api.RESPONSES: {
        "input": either(text, array(either(_MESSAGE, _PART))),
        "instructions": text,
        "max_output_tokens": _COUNT,
    },
    Api.MESSAGES: {"messages": array(_MESSAGE), "system": either(text, array(_PART)), "tools": array(anything)},
}
PAIRED_APIS: Sequence[Api] = tuple(_PROMPTS)

# Twice: what a request is about is to be there more often than each of the other fields.
_BODIES: Mapping[Api, Sequence[Shape]] = {
    api: (record(**prompt), record(**prompt, **_SHARED), record(**prompt, **_RANKS, stream=flag))
    for api, prompt in _PROMPTS.items()
}
_FORM = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'
_HEADERS: Headers = (
    (b"x-data-parallel-rank", b"1"),
    (b"x-data-parallel-rank", b"\xb2"),
    (b"x-data-parallel-rank", b"9999999999"),
    (b"x-request-priority", b"-3"),
    (b"x-request-priority", b"1_0"),
    (b"authorization", b"Bearer \xff"),
    (b"x-smg-routing-key", b""),
    (b"cookie", b"a=1"),
    (b"accept", b"*/*"),
    (b"x-prefiller-host-port", b"evil:1"),
    (b"content-type", b"Multipart/Form-Data; boundary=b"),
    (b"content-type", b"application/json"),
)


def headers(source: Source) -> Headers:
    """Return a few headers."""
    return [source.pick(_HEADERS) for _ in range(source.below(4))]


def body(source: Source, api: Api) -> bytes:
    """Return a body: one that the path takes, one with something spoilt, or just the bytes that are left."""
    if source.once_in(8):
        return source.rest()
    if api not in _BODIES:
        if source.once_in(2):
            return source.spoilt(record(model=text, stream=flag, input=anything, metadata=anything)(source))
        names = (b"model", b"stream", b"file")
        parts = [_FORM % (source.pick(names), source.pick((b"m", b"true", b"", b"x" * 300))) for _ in range(3)]
        return source.spoilt(b"".join(parts) + b"--b--\r\n")
    return source.spoilt(source.pick(_BODIES[api])(source))


def parsed(raw: bytes) -> object:
    """Return what JSON says to a strict reader of its own: order, names that stand twice, digits of numbers.

    Raises: ValueError, RecursionError.
    """
    return json.loads(
        raw.decode("utf-8", "surrogateescape"),
        object_pairs_hook=list,
        parse_int=lambda digits: ("int", digits),
        parse_float=lambda digits: ("float", digits),
        parse_constant=_refuse,
    )


def fields_of(raw: bytes) -> Pairs:
    """Return the fields of an object as ``parsed`` reads it, an array told apart from it."""
    told = parsed(raw)
    assert isinstance(told, list), told
    assert all(isinstance(pair, tuple) for pair in told)
    return told


def without(names: Collection[str], raw: bytes) -> object:
    """Return what JSON says but for these names, wherever they stand; of others that stand twice the last counts.

    Raises: as ``parsed``.
    """

    def kept(told: object) -> object:
        if not isinstance(told, list):
            return told
        if told and all(isinstance(item, tuple) for item in told):
            return {name: kept(value) for name, value in told if name not in names}
        return [kept(item) for item in told]

    return kept(parsed(raw))


def _refuse(name: str) -> None:
    raise ValueError(f"{name} isn't JSON")
