"""The settings themselves, and the document derived from them."""

from pathlib import Path

import pytest

from pdrouter.config import ENDPOINT_SETTINGS, SETTINGS, DemoSettings
from pdrouter.manual import document
from pdrouter.references import (
    check_profile_rule,
    check_tokenizer_file,
    profile_entries,
    profile_rule,
    tokenizer_file,
)
from pdrouter.setting import Setting, settings_of

ROOT = Path(__file__).parent.parent
EVERY_SETTING = [*SETTINGS.values(), *ENDPOINT_SETTINGS.values(), *settings_of(DemoSettings).values()]


@pytest.mark.parametrize("item", EVERY_SETTING, ids=lambda item: str(item.name))
def test_every_setting_is_described(item: Setting) -> None:
    """Each setting has a sentence; each number a unit and a range."""
    assert item.description.endswith(".")
    if item.base in (int, float):
        assert item.unit
        assert item.low is not None
        assert item.high is not None


def test_document_is_current() -> None:
    """docs/config.md is what ``python -m pdrouter.manual`` prints."""
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == document()
    assert all(f"| `{name}` |" in document() for name in SETTINGS)


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("m=NAME", ("m", "*", "NAME")),
        ("meta/*@H100*=NAME", ("meta/*", "H100*", "NAME")),
        ("a=b@c@d=NAME", ("a=b@c", "d", "NAME")),
    ],
)
def test_a_rule_for_profiles_is_taken_apart(text: str, parts: tuple[str, str, str]) -> None:
    """Model, GPU and name; a model may have any signs in it."""
    name = next(iter(profile_entries()))
    assert profile_rule(text.replace("NAME", name)) == tuple(part.replace("NAME", name) for part in parts)


@pytest.mark.parametrize("text", ["", "NAME", "=NAME", "m@=NAME", "@g=NAME", "m=", "m=nobody"])
def test_a_rule_that_is_none_is_refused(text: str) -> None:
    """With what to write."""
    with pytest.raises(ValueError, match=r"MODEL\[@GPU\]=NAME|write one of"):
        check_profile_rule(text.replace("NAME", next(iter(profile_entries()))))


def test_a_tokenizer_is_for_a_model_or_for_all() -> None:
    """The path stands behind the last equals sign."""
    assert tokenizer_file("/a/b") == (None, Path("/a/b"))
    assert tokenizer_file("x=y=/a") == ("x=y", Path("/a"))
    for text in ("", "m=", "=/a"):
        with pytest.raises(ValueError, match=r"\[MODEL=\]PATH"):
            check_tokenizer_file(text)
