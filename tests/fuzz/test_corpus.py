"""What the fuzzer keeps is read again without it, and each target finds code that is broken."""

import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from msgspec import Raw

from pdrouter.engines import base, samples, usage
from pdrouter.proxy import forms, intake
from pdrouter.proxy.client import Client
from pdrouter.upstream import connection
from tests.fuzz.__main__ import CORPUS, TARGETS

FILES = [(name, path) for name in TARGETS for path in sorted((CORPUS / name).iterdir())]

Break = tuple[object, str, Any]
BROKEN: Mapping[str, Break] = {
    "front": (Client, "take", lambda client, piece: setattr(client, "_body", client._body or piece)),
    "intake": (intake, "_set_fields", lambda _body: []),
    "splice": (base, "rest_without", lambda body, _owned: body[body.index(b"{") + 1 :]),
    "stream": (usage, "_whole_bytes", len),
    "samples": (samples, "_numbered", lambda fields, _sample, _count: {**fields, "index": Raw(b"0")}),
    "replies": (base, "_BOUNDS", {}),
    "forms": (forms, "parse_options_header", lambda _value: (b"", {b"name": b"model", b"boundary": b"b"})),
    "wire": (connection, "_is_framed", lambda _status, _headers: True),
}


def read(name: str, files: Iterable[Path]) -> None:
    """Give a target these inputs."""
    one_input: Callable[[bytes], None] = importlib.import_module(f"tests.fuzz.{name}").one_input
    for path in files:
        one_input(path.read_bytes())


@pytest.mark.parametrize(("name", "path"), FILES, ids=[f"{name}-{path.name}" for name, path in FILES])
def test_what_the_fuzzer_keeps(name: str, path: Path) -> None:
    """Each input holds its target's promises."""
    read(name, [path])


@pytest.mark.parametrize("name", TARGETS)
def test_a_target_finds_broken_code(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kept inputs alone are enough for that."""
    monkeypatch.setattr(*BROKEN[name])
    with pytest.raises(AssertionError):
        read(name, (CORPUS / name).iterdir())
