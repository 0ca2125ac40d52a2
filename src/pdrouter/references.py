"""Settings that name something else: shipped timing profiles, by name or by rule, and tokenizers by path."""

from importlib import resources
from pathlib import Path

import msgspec

from pdrouter.setting import shown


def check_profile(name: str) -> str:
    """Return the name of a shipped profile.

    Raises: ValueError with the names there are.
    """
    names = profile_entries()
    if name not in names:
        raise ValueError(f"write one of {', '.join(sorted(names))}")
    return name


def profile_rule(text: str) -> tuple[str, str, str]:
    """Return the parts of ``MODEL[@GPU]=NAME``: patterns of model and GPU, and the name of a shipped profile.

    Raises: ValueError that says what is wrong.
    """
    patterns, equals, name = text.rpartition("=")
    model, at, gpu = patterns.rpartition("@")
    if not equals or not patterns or (at and not (model and gpu)):
        raise ValueError(f"{shown(text)} is not MODEL[@GPU]=NAME")
    return (model, gpu, check_profile(name)) if at else (patterns, "*", check_profile(name))


def check_profile_rule(text: str) -> str:
    """Return the text if it is a rule for profiles."""
    profile_rule(text)
    return text


def tokenizer_file(text: str) -> tuple[str | None, Path]:
    """Return the parts of ``[MODEL=]PATH``; without a model it is for all that have none of their own.

    Raises: ValueError that says what is wrong.
    """
    model, equals, path = text.rpartition("=")
    if not path or (equals and not model):
        raise ValueError(f"{shown(text)} is not [MODEL=]PATH")
    return (model if equals else None), Path(path)


def check_tokenizer_file(text: str) -> str:
    """Return the text if it names a tokenizer; whether it is there is seen at start."""
    tokenizer_file(text)
    return text


def profile_entries() -> dict[str, dict[str, object]]:
    """Return the shipped timing profiles, as they stand in the package's data."""
    text = resources.files("pdrouter").joinpath("data/profiles.json").read_bytes()
    entries: dict[str, dict[str, object]] = msgspec.json.decode(text)["profiles"]
    return entries
