"""Token counts, blocks and answers are pure functions of the prompt."""

import pytest

from pdrouter.sim.text import (
    BLOCK_TOKENS,
    Prompt,
    answer_text,
    expected_text,
    render_chat,
    text_seed,
    token_text,
)


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("", 0), ("a", 1), ("abcd", 1), ("abcde", 2), ("é" * 4, 2), ("日本", 2), ([5, 6, 7], 3)],
)
def test_tokens_are_bytes_by_four_or_ids(prompt: str | list[int], tokens: int) -> None:
    """A text has ceil(utf-8 bytes / 4) tokens, a list its length."""
    assert Prompt(prompt, 4).tokens == tokens


def test_an_answer_is_a_pure_function_of_prompt_and_choice() -> None:
    """The same prompt gives the same words, another prompt or choice gives others."""
    text = expected_text("hello", 20)
    assert text == expected_text("hello", 20)
    assert text != expected_text("hellp", 20)
    assert text != expected_text("hello", 20, choice=1)
    assert text.startswith(expected_text("hello", 7))
    seed = text_seed(Prompt("hello", 4).digest, 0)
    assert text == "".join(token_text(seed, i) for i in range(20))
    assert text == answer_text(seed, 0, 9) + answer_text(seed, 9, 20)


def test_an_answer_has_as_many_tokens_as_it_was_generated_with() -> None:
    """Token counting and generation agree, so a follow-up turn counts right."""
    assert Prompt(expected_text([1, 2], 33), 4).tokens == 33


def test_blocks_are_shared_up_to_the_first_difference() -> None:
    """A block's hash names everything before it too."""
    size = BLOCK_TOKENS * 4
    one = Prompt("a" * size + "b" * size + "c" * size, 4).blocks
    two = Prompt("a" * size + "x" * size + "c" * size, 4).blocks
    assert len(one) == len(two) == 3
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert one[2] != two[2]
    assert Prompt("a" * (size + 255), 4).blocks == one[:1]


def test_ids_and_text_do_not_share_blocks() -> None:
    """Token ids of the same bytes are another prompt."""
    ids = [0x61616161] * BLOCK_TOKENS
    assert Prompt(ids, 4).blocks != Prompt("a" * 8 * BLOCK_TOKENS, 4).blocks[:1]


def test_chat_is_rendered_in_order_with_roles_parts_and_tools() -> None:
    """Nothing that an engine would read is left out."""
    messages: list[dict[str, object]] = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "hi "}, {"type": "image_url", "url": "u"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    ]
    text = render_chat(messages)
    assert text.startswith("<|system|>\nbe brief\n<|user|>\nhi ")
    assert text.endswith("<|assistant|>\n")
    assert '"url":"u"' in text
    assert '"tool_calls":[{"id":"1"}]' in text
    assert render_chat(messages, [{"name": "f"}]) != text
    assert render_chat(messages[::-1]) != text
