"""What engines with OpenAI's API tell of themselves."""

import pytest

from pdrouter.engines.about import described
from pdrouter.engines.base import Described


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        ("/v1/models", b'{"data":[{"id":"m"},{"id":"lora"}]}', Described(model="m")),
        ("/v1/models", b'{"data":[]}', None),
        ("/version", b'{"version":"1.2"}', Described(version="1.2")),
    ],
)
def test_model_and_version(path: str, body: bytes, told: Described | None) -> None:
    """Of several models the first; nothing where there is none."""
    assert described(path, body) == told


@pytest.mark.parametrize("path", ["/v1/models", "/version"])
@pytest.mark.parametrize("body", [b"", b"null", b"<html>", b'{"data":5}', b'{"version":5}', b"\xff", b"[" * 100_000])
def test_what_isnt_such_a_page(path: str, body: bytes) -> None:
    """It tells nothing, and breaks nothing."""
    assert described(path, body) is None
