"""What engines with OpenAI's API tell of themselves, all in the same way: their model, and perhaps a version."""

import msgspec

from pdrouter.engines.base import Described


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


def described(path: str, body: bytes) -> Described | None:
    """Read ``/version``, or ``/v1/models``, of several the first; ``None`` if it isn't understood."""
    try:
        if path == "/version":
            return Described(version=msgspec.json.decode(body, type=_Version).version)
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return Described(model=models[0].id) if models else None
