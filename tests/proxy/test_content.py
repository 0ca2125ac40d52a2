"""Contents: in each API's way of saying it media count as media, by what they are, and everything else as text."""

import json
from collections.abc import Mapping

import pytest

from pdrouter.proxy.bodies import MAX_OBJECTS, Api
from pdrouter.proxy.content import MAX_MEDIA
from tests.proxy.test_intake import refuse
from tests.proxy.test_prompts import BLOCK_BYTES, BYTES_PER_TOKEN, FILLER, IMAGE_TOKENS, facts_of, shared_blocks

Body = dict[str, object]

DATA = "iVBORw0KGgo" + "A" * 200_000
URL = "data:image/png;base64," + DATA
BASE64 = {"type": "base64", "media_type": "image/png", "data": DATA}
AUDIO = {"data": DATA, "format": "wav"}


def chat(*parts: object, role: str = "user") -> Body:
    """Return a chat whose last message has these parts, behind some text."""
    return {"messages": [{"role": "system", "content": FILLER}, {"role": role, "content": [*parts]}]}


def responses(*items: object) -> Body:
    """Return a request with these items, behind some text."""
    return {"input": [{"type": "message", "role": "user", "content": FILLER}, *items]}


def said(*parts: object) -> Body:
    """Return an item of ``/v1/responses`` with these parts."""
    return {"type": "message", "role": "user", "content": [*parts]}


def result(content: object) -> Body:
    """Return a tool's result, as Anthropic's API has it."""
    return {"type": "tool_result", "tool_use_id": "t", "content": content}


MEDIA: Mapping[str, tuple[Api, Body]] = {
    "image": (Api.CHAT, chat({"type": "image_url", "image_url": {"url": URL}})),
    "image as text": (Api.CHAT, chat({"type": "image_url", "image_url": URL})),
    "image without a type": (Api.CHAT, chat({"image_url": URL})),
    "image of a tool": (Api.CHAT, chat({"type": "image_url", "image_url": {"url": URL}}, role="tool")),
    "audio": (Api.CHAT, chat({"type": "input_audio", "input_audio": AUDIO})),
    "audio by URL": (Api.CHAT, chat({"type": "audio_url", "audio_url": {"url": URL}})),
    "video": (Api.CHAT, chat({"type": "video_url", "video_url": {"url": URL}})),
    "file": (Api.CHAT, chat({"type": "file", "file": {"file_data": URL, "filename": "a.pdf"}})),
    "embeddings": (Api.CHAT, chat({"type": "image_embeds", "image_embeds": DATA})),
    "image in responses": (Api.RESPONSES, responses(said({"type": "input_image", "image_url": URL}))),
    "file in responses": (
        Api.RESPONSES,
        responses(said({"type": "input_file", "filename": "a.pdf", "file_data": URL})),
    ),
    "audio in responses": (Api.RESPONSES, responses(said({"type": "input_audio", "input_audio": AUDIO}))),
    "image of a function": (
        Api.RESPONSES,
        responses({"type": "function_call_output", "output": [{"type": "input_image", "image_url": URL}]}),
    ),
    "screenshot": (
        Api.RESPONSES,
        responses({"type": "computer_call_output", "output": {"type": "computer_screenshot", "image_url": URL}}),
    ),
    "image in messages": (Api.MESSAGES, chat({"type": "image", "source": BASE64})),
    "image by URL in messages": (Api.MESSAGES, chat({"type": "image", "source": {"type": "url", "url": URL}})),
    "image as text in messages": (Api.MESSAGES, chat({"type": "image", "source": URL})),
    "document": (Api.MESSAGES, chat({"type": "document", "source": BASE64 | {"media_type": "application/pdf"}})),
    "image in a result": (Api.MESSAGES, chat(result([{"type": "image", "source": BASE64}]))),
    "image in a document": (
        Api.MESSAGES,
        chat({"type": "document", "source": {"type": "content", "content": [{"type": "image", "source": BASE64}]}}),
    ),
    "image in a document in a result": (
        Api.MESSAGES,
        chat(
            result(
                [{"type": "document", "source": {"type": "content", "content": [{"type": "image", "source": BASE64}]}}]
            )
        ),
    ),
    **{
        f"{field} with {prompt}": (Api.GENERATE, {prompt: value, field: URL})
        for field in ("image_data", "audio_data", "video_data")
        for prompt, value in (("text", FILLER), ("input_ids", [1, 2, 3]), ("input_embeds", [[0.5], [0.5]]))
    },
    "image_data as a list": (Api.GENERATE, {"text": FILLER, "image_data": [URL]}),
    "image_data as an object": (Api.GENERATE, {"text": FILLER, "image_data": {"url": URL}}),
    "image_data as lists": (Api.GENERATE, {"text": [FILLER, "b"], "image_data": [[URL], None]}),
}


@pytest.mark.parametrize("name", MEDIA)
def test_a_medium_counts_as_one(name: str) -> None:
    """As one image's tokens beside the text, and never as its bytes; a count of it teaches nothing about text."""
    api, body = MEDIA[name]
    facts = facts_of(api, body)
    text_tokens = len(FILLER) / BYTES_PER_TOKEN
    assert IMAGE_TOKENS <= facts.prompt_tokens <= IMAGE_TOKENS + text_tokens + 40
    assert (facts.text, facts.prompt_bytes) == (None, 0)


@pytest.mark.parametrize("name", [name for name, (_, body) in MEDIA.items() if not isinstance(body.get("text"), list)])
def test_a_medium_is_compared_by_what_it_is(name: str) -> None:
    """The same one is shared whole, another isn't, whatever else is equal; and it is as wide as its tokens."""
    api, body = MEDIA[name]
    other = json.dumps(body).replace("AAAAAAAA", "AAAABAAA", 1).encode()
    first, second = facts_of(api, body), facts_of(api, other)
    text = 0 if api is Api.GENERATE else len(FILLER) // BLOCK_BYTES
    image = IMAGE_TOKENS * 4 // BLOCK_BYTES
    assert first.prefix_blocks == facts_of(api, body).prefix_blocks
    assert text <= shared_blocks(first, second) <= text + 2
    assert text + image <= len(first.prefix_blocks) <= text + image + len(FILLER) // BLOCK_BYTES + 3


def test_media_in_lists() -> None:
    """Each counts; one for all is each sample's; null is none."""
    for media, count in (
        ([URL, URL], 2),
        ([[URL, URL], [URL]], 3),
        ([[URL], None], 1),
        ([None, None], 0),
        ([], 0),
        (None, 0),
        (URL, 2),
    ):
        facts = facts_of(Api.GENERATE, {"text": ["a", "b"], "image_data": media})
        assert count * IMAGE_TOKENS <= facts.prompt_tokens <= count * IMAGE_TOKENS + 10
    several = {"image_url": URL}, {"image_url": URL}, {"text": "x"}, {"input_audio": AUDIO}
    assert 3 * IMAGE_TOKENS <= facts_of(Api.CHAT, chat(*several)).prompt_tokens <= 3 * IMAGE_TOKENS + 100


TEXT = "word " * 400
TEXTS: Mapping[str, tuple[Api, Body]] = {
    "text": (Api.CHAT, chat({"type": "text", "text": TEXT})),
    "text beside null": (Api.CHAT, chat({"type": "text", "text": TEXT, "image_url": None})),
    "thinking": (Api.CHAT, chat({"type": "thinking", "thinking": TEXT})),
    "refusal": (Api.CHAT, chat({"type": "refusal", "refusal": TEXT})),
    "input text": (Api.RESPONSES, responses(said({"type": "input_text", "text": TEXT}))),
    "a call": (Api.RESPONSES, responses({"type": "function_call", "name": "f", "arguments": TEXT})),
    "a function's output": (Api.RESPONSES, responses({"type": "function_call_output", "output": TEXT})),
    "a function's output in parts": (
        Api.RESPONSES,
        responses({"type": "function_call_output", "output": [{"type": "input_text", "text": TEXT}]}),
    ),
    "a reasoning": (
        Api.RESPONSES,
        responses({"type": "reasoning", "summary": [{"text": TEXT}], "encrypted_content": DATA}),
    ),
    "a use of a tool": (Api.MESSAGES, chat({"type": "tool_use", "id": "t", "name": "f", "input": {"a": TEXT}})),
    "a result": (Api.MESSAGES, chat(result(TEXT))),
    "a result in parts": (Api.MESSAGES, chat(result([{"type": "text", "text": TEXT}]))),
    "a found page": (
        Api.MESSAGES,
        chat({"type": "search_result", "source": "http://a", "content": [{"type": "text", "text": TEXT}]}),
    ),
    "a document": (
        Api.MESSAGES,
        chat({"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": TEXT}}),
    ),
    "a document in parts": (Api.MESSAGES, chat({"type": "document", "source": {"type": "content", "content": TEXT}})),
    "what nobody knows": (Api.CHAT, chat({"type": "new", "new": {"deep": TEXT}})),
}


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_no_medium_is_text(name: str) -> None:
    """Wherever it stands, and whatever it is called."""
    api, body = TEXTS[name]
    facts = facts_of(api, body)
    expected = (len(TEXT) + len(FILLER)) / BYTES_PER_TOKEN
    assert facts.prompt_tokens == pytest.approx(expected, abs=40)
    assert facts.prompt_bytes > 0


def deep(levels: int) -> Body:
    """Return a chat with results in results."""
    content: object = [{"type": "image", "source": BASE64}]
    for _ in range(levels):
        content = [result(content)]
    return {"messages": [{"role": "user", "content": content}]}


def test_results_in_results() -> None:
    """As deep as APIs allow, and then it is text: nothing is read again and again."""
    assert facts_of(Api.MESSAGES, deep(2)).prompt_tokens < IMAGE_TOKENS + 50
    assert facts_of(Api.MESSAGES, deep(50)).prompt_tokens > len(DATA) / BYTES_PER_TOKEN / 2


@pytest.mark.invariant("I9")
def test_too_many_media() -> None:
    """Beyond the limit it is the client's mistake, in each API; what only looks like one doesn't count."""

    def ask(count: int) -> Mapping[str, tuple[Api, Body, str]]:
        images = [{"image_url": "u"}] * count
        return {
            "chat": (Api.CHAT, chat(*images), "messages"),
            "responses": (Api.RESPONSES, responses(said(*images)), "input"),
            "generate": (Api.GENERATE, {"text": "x", "image_data": ["u"] * count}, "image_data"),
            "generate, lists": (Api.GENERATE, {"text": "x", "video_data": [["u"] * count]}, "video_data"),
            "generate, long": (Api.GENERATE, {"text": "x", "image_data": ["u" * 20] * count}, "image_data"),
        }

    for api, body, _ in ask(MAX_MEDIA).values():
        assert facts_of(api, body).prompt_tokens >= MAX_MEDIA * IMAGE_TOKENS
    for api, body, param in ask(MAX_MEDIA + 1).values():
        assert refuse(api, body) == (400, "invalid_request", param)
    assert facts_of(Api.CHAT, chat(*[{"image_url": None}] * (MAX_MEDIA + 1))).prompt_bytes > 0


@pytest.mark.invariant("I9")
def test_too_many_objects() -> None:
    """Messages, parts, tools: counted before any is read; braces in text are none."""
    objects = b"{}," * (MAX_OBJECTS - 1)
    for body in (
        b'{"messages":[%b{}]}',
        b'{"messages":[{"content":[%b{}]}]}',
        b'{"messages":[{"content":"x"}],"tools":[%b{}]}',
        b'{"messages":[{"content":"x"}],"unknown":[%b{}]}',
    ):
        assert refuse(Api.CHAT, body % objects) == (400, "invalid_request", None)
    facts = facts_of(Api.CHAT, b'{"messages":[{"content":"%b\\"{"}]}' % (b"{" * 2 * MAX_OBJECTS))
    assert facts.prompt_bytes > MAX_OBJECTS
