"""Hides keys in what an engine tells of itself: SGLang's ``/server_info`` has its ``--api-key`` in it, in clear."""

from collections.abc import Collection, Iterator

import msgspec

from pdrouter.setting import SECRET, Secret

_KEY_FIELDS = ("api_key",)
"""How the names of fields with a key end. Source: ``api_key`` and ``admin_api_key`` of SGLang's ``server_args.py``."""


def without_keys(body: bytes, key: Secret | None) -> bytes:
    """Return a document without any key: one that is told under such a name, and ``key``, wherever they stand."""
    secrets = {key.reveal()} if key is not None else set()
    try:
        document = msgspec.json.decode(body)
        secrets |= set(_told(document))
        return msgspec.json.encode(_hidden(document, secrets)) if secrets else body
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        for secret in secrets:
            body = body.replace(secret.encode(), SECRET.encode())
        return body


def _told(value: object) -> Iterator[str]:
    """Yield the values of fields that hold a key."""
    if isinstance(value, dict):
        for name, part in value.items():
            if isinstance(part, str) and part and name.endswith(_KEY_FIELDS):
                yield part
            yield from _told(part)
    elif isinstance(value, list):
        for part in value:
            yield from _told(part)


def _hidden(value: object, secrets: Collection[str]) -> object:
    if isinstance(value, dict):
        return {name: _hidden(part, secrets) for name, part in value.items()}
    if isinstance(value, list):
        return [_hidden(part, secrets) for part in value]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, SECRET)
    return value
