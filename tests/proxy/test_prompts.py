"""Prompts: how large they are, how many, and what two of them have in common."""

import json
from collections.abc import Mapping

import msgspec
import pytest

from pdrouter.config import Settings
from pdrouter.core.request import RequestFacts
from pdrouter.options import intake_options
from pdrouter.proxy.intake import Api, Intake
from tests.core.builders import make_router

IMAGE_TOKENS = 1000
BLOCK_BYTES = 16
BYTES_PER_TOKEN = Settings().bytes_per_token
FILLER = "The quick brown fox jumps over the lazy dog. " * 4


def facts_of(api: Api, body: Mapping[str, object] | bytes) -> RequestFacts:
    """Return what the intake learns of a body; text is written as most clients do, without escapes."""
    settings = msgspec.structs.replace(Settings(), prefix_block_bytes=BLOCK_BYTES, image_tokens=IMAGE_TOKENS)
    raw = body if isinstance(body, bytes) else json.dumps(body, ensure_ascii=False).encode()
    return Intake(make_router([]), intake_options(settings)).read(api, [], raw, "r")[0]


def chat(*contents: object, **fields: object) -> dict[str, object]:
    """Return a conversation in which user and assistant take turns."""
    roles = ("user", "assistant")
    messages = [{"role": roles[turn % 2], "content": content} for turn, content in enumerate(contents)]
    return {"model": "m", "messages": messages, **fields}


def shared_blocks(first: RequestFacts, second: RequestFacts) -> int:
    """Return how many leading blocks two prompts share."""
    pairs = zip(first.prefix_blocks, second.prefix_blocks, strict=False)
    same = [a == b for a, b in pairs]
    return same.index(False) if False in same else len(same)


# Size


@pytest.mark.parametrize(
    ("text", "off_by"),
    [
        ("word " * 400, 0.02),
        ("\u4f60\u597d\u3002" * 300, 0.04),
        ("na\u00efve caf\u00e9 " * 200, 0.2),
        ("\U0001f600" * 500, 0.55),
    ],
)
def test_text_counts_about_the_same_however_it_is_escaped(text: str, off_by: float) -> None:
    """The estimate goes by bytes of UTF-8; an escape counts for three, which is right for most that is written so."""
    expected = len(text.encode()) / BYTES_PER_TOKEN
    for api, body in (
        (Api.CHAT, chat(text)),
        (Api.COMPLETIONS, {"prompt": text}),
        (Api.GENERATE, {"text": text}),
        (Api.COMPLETIONS, {"prompt": [text]}),
        (Api.CHAT, chat([{"type": "text", "text": text}])),
    ):
        plain, escaped = facts_of(api, body), facts_of(api, json.dumps(body).encode())
        assert plain.prompt_tokens == pytest.approx(expected, rel=0.02, abs=4)
        assert escaped.prompt_tokens == pytest.approx(expected, rel=off_by, abs=4)


@pytest.mark.parametrize(
    ("api", "body", "is_text"),
    [
        (Api.CHAT, {"messages": [{"role": "user", "content": "Hi"}]}, True),
        (Api.COMPLETIONS, {"prompt": ["Hi"]}, True),
        (Api.COMPLETIONS, {"prompt": ["Hi", "Ho"]}, False),
        (Api.COMPLETIONS, {"prompt": "Hi", "n": 2}, False),
        (Api.COMPLETIONS, {"prompt": [1, 2]}, False),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"i": 1}]}]}, True),
        (Api.CHAT, {"messages": [{"role": "user", "content": [{"image_url": "u"}, {"text": "Hi"}]}]}, False),
    ],
)
def test_what_counts_teach(api: Api, body: dict[str, object], is_text: bool) -> None:
    """An engine's count of one prompt of text alone tells what text costs; of a batch, ids or images it doesn't."""
    facts = facts_of(api, body)
    assert (facts.text is not None, facts.prompt_bytes > 0) == (is_text, is_text)


@pytest.mark.parametrize(
    ("field", "value", "tokens", "prompts"),
    [
        ("input_ids", [5], 1, 1),
        ("input_ids", list(range(1000)), 1000, 1),
        ("input_ids", [[1, 2, 3], [4]], 4, 2),
        ("input_ids", [[1, 2, 3]], 3, 1),
        ("input_embeds", [[0.5, -1e-05], [1.0, 2.0], [0, 0]], 3, 1),
        ("input_embeds", [[[0.5, 1.0], [1.0, 2.0]], [[0.5, 1.0]]], 3, 2),
    ],
)
def test_ids_and_rows_are_counted(field: str, value: object, tokens: int, prompts: int) -> None:
    """Exactly: nothing is to be learned from their bytes."""
    facts = facts_of(Api.GENERATE, {field: value})
    assert (facts.prompt_tokens, facts.prompts, facts.prompt_bytes) == (tokens, prompts, 0)


def test_ids_are_counted_in_any_spacing() -> None:
    """As compact as a proxy writes them, or one a line."""
    for body in (b'{"prompt":[1,2,3]}', b'{"prompt": [ 1, 2, 3 ]}', b'{"prompt":[\n1\n,\n2\n,\n3\n]}'):
        assert facts_of(Api.COMPLETIONS, body).prompt_tokens == 3


@pytest.mark.parametrize(
    ("api", "body", "tokens", "prompts"),
    [
        (Api.COMPLETIONS, {"prompt": [[1, 2], [3]], "n": 2}, 6, 4),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3], "n": 3}, 9, 3),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3], "n": 1}, 3, 1),
        (Api.COMPLETIONS, {"prompt": [1, 2, 3], "n": None}, 3, 1),
        (Api.GENERATE, {"input_ids": [1, 2], "sampling_params": {"n": 3}}, 6, 3),
        (Api.GENERATE, {"input_ids": [[1], [2]], "sampling_params": [{"n": 2}, {"n": 2}]}, 4, 4),
        (Api.GENERATE, {"input_ids": [1, 2], "sampling_params": []}, 2, 1),
        (Api.GENERATE, {"input_ids": [1, 2], "sampling_params": None}, 2, 1),
        (Api.GENERATE, {"input_ids": [1, 2], "n": 5}, 2, 1),
    ],
)
def test_a_batch_weighs_all_its_samples(api: Api, body: dict[str, object], tokens: int, prompts: int) -> None:
    """Prompts times answers; ``/generate`` has its ``n`` among the sampling parameters and nowhere else."""
    facts = facts_of(api, body)
    assert (facts.prompt_tokens, facts.prompts) == (tokens, prompts)
    assert (facts.prefix_blocks == ()) or prompts == 1


def test_images_count_as_set() -> None:
    """Each part that isn't text, however long its data; a usage report then says nothing of the text's rate."""
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 100_000}}
    text = {"type": "text", "text": "word " * 80}
    facts = facts_of(Api.CHAT, chat([text, image, image]))
    assert facts.prompt_tokens == pytest.approx(2 * IMAGE_TOKENS + 400 / BYTES_PER_TOKEN, abs=4)
    assert facts.prompt_bytes == 0
    assert facts_of(Api.CHAT, chat([text])).prompt_bytes > 0


def test_tools_and_their_calls_count_as_text() -> None:
    """An assistant's calls are no images."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "x" * 400}}
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": None, "tool_calls": [call, call]}]
    body = {"messages": messages, "tools": [{"type": "function", "function": {"description": "y" * 800}}]}
    facts = facts_of(Api.CHAT, body)
    assert facts.prompt_tokens == pytest.approx(len(json.dumps(body)) / BYTES_PER_TOKEN, rel=0.15)
    assert facts.prompt_bytes > 1600


def test_a_prompt_is_at_least_one_token() -> None:
    """Even an empty one."""
    for api, body in ((Api.CHAT, chat("")), (Api.COMPLETIONS, {"prompt": ""}), (Api.GENERATE, {"text": [""]})):
        assert facts_of(api, body).prompt_tokens >= 1


def test_tokens_of_a_block() -> None:
    """All blocks together are about the prompt."""
    for facts in (facts_of(Api.CHAT, chat(FILLER)), facts_of(Api.GENERATE, {"input_ids": list(range(100, 900))})):
        assert facts.block_tokens * len(facts.prefix_blocks) == pytest.approx(facts.prompt_tokens, rel=0.1)


# Prefixes


def test_a_longer_conversation_begins_with_the_shorter() -> None:
    """The next turn shares all whole blocks of the one before."""
    first, second = facts_of(Api.CHAT, chat(FILLER)), facts_of(Api.CHAT, chat(FILLER, "Yes.", FILLER))
    assert shared_blocks(first, second) >= len(first.prefix_blocks) - 1 > 5
    assert len(second.prefix_blocks) > len(first.prefix_blocks)


@pytest.mark.parametrize(
    ("api", "body", "other"),
    [
        (Api.GENERATE, {"text": "hello"}, {"text": "hello!"}),
        (Api.GENERATE, {"input_ids": [1, 2, 3]}, {"input_ids": [1, 2, 4]}),
        (Api.CHAT, chat("a"), chat("b")),
        (Api.COMPLETIONS, {"prompt": "hello"}, {"prompt": "hallo"}),
    ],
)
def test_a_prompt_shorter_than_a_block_is_compared_as_a_whole(
    api: Api, body: dict[str, object], other: dict[str, object]
) -> None:
    """It has one hash, which only an equal prompt has, and its block is all of it."""
    facts, same, differing = facts_of(api, body), facts_of(api, dict(body)), facts_of(api, other)
    assert facts.is_short
    assert facts.prefix_blocks == same.prefix_blocks
    assert len(facts.prefix_blocks) == 1
    assert facts.prefix_blocks != differing.prefix_blocks
    assert facts.block_tokens == pytest.approx(facts.prompt_tokens, abs=1)
    assert not facts_of(Api.GENERATE, {"text": FILLER}).is_short


@pytest.mark.parametrize(("size", "is_short"), [(13, True), (14, False), (15, False)])
def test_a_prompt_of_one_block_isnt_short(size: int, is_short: bool) -> None:
    """With its quotes it is as long as a block."""
    assert facts_of(Api.GENERATE, {"text": "x" * size}).is_short is is_short


def test_what_isnt_one_prompt_has_no_blocks() -> None:
    """Nor is it short."""
    for facts in (facts_of(Api.GENERATE, {"text": ["a", "b"]}), facts_of(Api.CHAT, chat("a", n=2))):
        assert (facts.prefix_blocks, facts.is_short) == ((), False)


@pytest.mark.parametrize(
    ("api", "first", "second"),
    [
        (Api.COMPLETIONS, {"prompt": FILLER}, {"prompt": FILLER + FILLER, "max_tokens": 5}),
        (Api.GENERATE, {"text": FILLER}, {"text": FILLER + "!", "stream": True}),
        (Api.GENERATE, {"input_ids": list(range(100))}, {"input_ids": list(range(200))}),
    ],
)
def test_equal_beginnings_are_equal_blocks(api: Api, first: dict[str, object], second: dict[str, object]) -> None:
    """Whatever else the bodies say."""
    short, long = facts_of(api, first), facts_of(api, second)
    assert shared_blocks(short, long) >= len(short.prefix_blocks) - 1 > 5


@pytest.mark.parametrize(
    "other",
    [
        chat(FILLER, model="other"),
        {"messages": chat(FILLER)["messages"]},
        chat(FILLER, lora_path="adapter"),
        chat(FILLER, cache_salt="tenant"),
        chat(FILLER, extra_key="tenant"),
        chat(FILLER, tools=[{"type": "function", "function": {"name": "f"}}]),
        {"model": "m", "messages": [{"role": "system", "content": FILLER}]},
        {"model": "m", "messages": [{"role": "assistant", "content": FILLER}]},
        chat("x" + FILLER),
    ],
)
def test_what_an_engine_would_not_share_is_not_shared(other: dict[str, object]) -> None:
    """Another model, adapter, salt, tools, role or first word: nothing in common from the first block on."""
    first = facts_of(Api.CHAT, chat(FILLER))
    assert len(first.prefix_blocks) > 5
    assert shared_blocks(first, facts_of(Api.CHAT, other)) == 0


def test_caches_are_separated_by_name_and_value() -> None:
    """Null is nothing; a value is only itself, and in no other field."""
    fields = ("lora_path", "cache_salt", "extra_key")
    plain = facts_of(Api.GENERATE, {"text": FILLER}).prefix_blocks
    assert all(facts_of(Api.GENERATE, {"text": FILLER, field: None}).prefix_blocks == plain for field in fields)
    named = [
        facts_of(Api.GENERATE, {"text": FILLER, field: value}).prefix_blocks
        for field in fields
        for value in ("a", "b", ["a"])
    ]
    assert len({plain, *named}) == 10


TOOLS = [{"type": "function", "function": {"name": "f", "description": FILLER}}]


def test_tools_stand_behind_the_system_message() -> None:
    """As chat templates put them: who shares only the system message shares that, but nothing behind the tools."""

    def ask(tools: object, *roles: str) -> RequestFacts:
        messages = [{"role": role, "content": FILLER} for role in roles]
        return facts_of(Api.CHAT, {"messages": messages, "tools": tools})

    system = len(FILLER) // BLOCK_BYTES
    for role in ("system", "developer"):
        plain, with_tools = ask(None, role, "user"), ask(TOOLS, role, "user")
        assert system <= shared_blocks(plain, with_tools) <= system + 2
        assert shared_blocks(with_tools, ask(TOOLS, role, "user", "assistant")) > 3 * system
    assert shared_blocks(ask(None, "user"), ask(TOOLS, "user")) == 0
    assert shared_blocks(ask(TOOLS, "user"), ask(TOOLS, "user", "assistant")) > 2 * system
    assert len(ask(TOOLS, "system").prefix_blocks) > 2 * system


def test_text_is_the_same_in_parts() -> None:
    """A string, or a list with that string as its only part: engines see no difference."""
    whole, part = facts_of(Api.CHAT, chat(FILLER)), facts_of(Api.CHAT, chat([{"type": "text", "text": FILLER}]))
    assert whole.prefix_blocks == part.prefix_blocks


def image_of(letter: str) -> dict[str, object]:
    """Return a part with an image that differs from others' in its middle."""
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{'A' * 5000}{letter}{'A' * 5000}"}}


def test_images_are_compared_by_content() -> None:
    """The same image is shared, another isn't; and an image is as wide as its tokens, not as its data."""

    def ask(*images: str) -> RequestFacts:
        return facts_of(Api.CHAT, chat([{"type": "text", "text": FILLER}, *map(image_of, images)], "Yes.", FILLER))

    first, same, other = ask("a", "b"), ask("a", "b"), ask("a", "c")
    assert first.prefix_blocks == same.prefix_blocks
    text, image = len(FILLER) // BLOCK_BYTES, IMAGE_TOKENS * 4 // BLOCK_BYTES
    assert text + image <= shared_blocks(first, other) <= text + image + 2
    assert text <= shared_blocks(first, ask("c", "b")) <= text + 2
    assert len(first.prefix_blocks) == pytest.approx(2 * text + 2 * image, abs=3)
    assert first.block_tokens == pytest.approx(BLOCK_BYTES / BYTES_PER_TOKEN, rel=0.05)


@pytest.mark.parametrize("separators", [(",", ":"), (", ", ": ")])
def test_blocks_of_ids_end_with_an_id(separators: tuple[str, str]) -> None:
    """However long the ids are: prompts that share all ids of a block share the block, whatever comes next."""
    ids = [7, 12, 345, 67_890, 123_456] * 40

    def ask(*more: int) -> RequestFacts:
        return facts_of(Api.COMPLETIONS, json.dumps({"prompt": ids + list(more)}, separators=separators).encode())

    blocks = ask(1, 2).prefix_blocks
    assert len(blocks) > 20
    assert shared_blocks(ask(1, 2), ask(1, 3)) >= len(blocks) - 1
    assert shared_blocks(ask(7), ask(7, *ids)) >= len(blocks) - 1


def test_a_change_in_the_middle_ends_what_is_shared() -> None:
    """Blocks before it are shared, blocks behind it aren't, equal as they are."""
    first = facts_of(Api.CHAT, chat(FILLER, "Yes.", FILLER))
    second = facts_of(Api.CHAT, chat(FILLER, "No!!", FILLER))
    assert 5 < shared_blocks(first, second) <= len(FILLER) // BLOCK_BYTES + 1
    assert not set(first.prefix_blocks[-3:]) & set(second.prefix_blocks[-3:])


def test_tool_calls_are_part_of_a_conversation() -> None:
    """Conversations that differ in a call alone share what is before it."""

    def ask(city: str) -> RequestFacts:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": city}}
        return facts_of(
            Api.CHAT,
            {
                "messages": [
                    {"role": "user", "content": FILLER},
                    {"role": "assistant", "content": None, "tool_calls": [call]},
                    {"role": "tool", "content": FILLER},
                ]
            },
        )

    first, second = ask("Oslo"), ask("Rome")
    assert 5 < shared_blocks(first, second) < len(first.prefix_blocks) - 5
