"""Documents of engines that are passed on: without keys, and else as they were."""

import json

import pytest

from pdrouter.proxy.redaction import without_keys
from pdrouter.setting import Secret

KEY = Secret("sk-1")


def test_keys_are_hidden_wherever_they_stand() -> None:
    """The one that we know, those that the document names as keys, and each of them in other texts."""
    told = {
        "api_key": "sk-1",
        "nested": [{"admin_api_key": "sk-2", "n": 1.5, "none": None}],
        "launch_command": "serve --api-key sk-1 --admin-api-key sk-2",
        "model": "m",
    }
    hidden = {
        "api_key": "(secret)",
        "nested": [{"admin_api_key": "(secret)", "n": 1.5, "none": None}],
        "launch_command": "serve --api-key (secret) --admin-api-key (secret)",
        "model": "m",
    }
    assert json.loads(without_keys(json.dumps(told).encode(), KEY)) == hidden
    assert json.loads(without_keys(json.dumps(told).encode(), None)) == hidden


@pytest.mark.parametrize("body", [b'{ "a" : 1.0, "api_key": null, "b_api_key": "" }', b"[]", b"", b"text", b"\xff"])
def test_a_document_without_keys_is_left_as_it_is(body: bytes) -> None:
    """Byte for byte, where there is no key to hide."""
    assert without_keys(body, None) == body


@pytest.mark.parametrize("body", [b"key sk-1 here", b"[" * 100_000 + b"sk-1", b'"sk-1\xff'])
def test_what_is_no_document_has_no_key_either(body: bytes) -> None:
    """Text, or JSON that can't be read."""
    assert without_keys(body, KEY) == body.replace(b"sk-1", b"(secret)")
