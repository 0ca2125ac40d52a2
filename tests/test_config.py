"""The settings themselves, and the document derived from them."""

from pathlib import Path

import pytest

from pdrouter.config import ENDPOINT_SETTINGS, SETTINGS, DemoSettings, document
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
    """docs/config.md is what ``python -m pdrouter.config`` prints."""
    assert (ROOT / "docs" / "config.md").read_text(encoding="utf-8") == document()
    assert all(f"| `{name}` |" in document() for name in SETTINGS)
