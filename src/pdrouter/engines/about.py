"""What engines with OpenAI's API tell of themselves, all in the same way: the ids they list, and perhaps a version."""

from collections.abc import Mapping

import msgspec

from pdrouter.core.names import Card
from pdrouter.engines.base import MAX_ID_CHARS, Described

MODELS_PATH = "/v1/models"

ENGINE_OF_OWNER: Mapping[str, str] = {"sglang": "sglang", "vllm": "vllm", "tensorrt_llm": "trtllm"}
"""The kind of engine by ``owned_by`` of what it lists.

Source: ``ModelCard`` of SGLang 0.5.6 to 0.5.23 (``entrypoints/openai/protocol.py``), vLLM 0.32
(``entrypoints/serve/engine/protocol.py``), TensorRT-LLM 1.2 (``serve/openai_protocol.py``).
"""

_MAX_ROOT_CHARS = 4096
"""A longer path isn't taken (I9). Source: Linux's PATH_MAX."""


class _Model(msgspec.Struct):
    """Only the id is needed; what else is of another type than it should be isn't told."""

    id: object
    created: object = None
    owned_by: object = None
    root: object = None
    parent: object = None
    max_model_len: object = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _Version(msgspec.Struct):
    version: str


def described(path: str, body: bytes) -> Described | None:
    """Read ``/version`` or ``/v1/models``; ``None`` if it isn't understood."""
    if path == MODELS_PATH:
        return listed(body)
    try:
        return Described(version=msgspec.json.decode(body, type=_Version).version)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None


def listed(body: bytes, adapter_name: str | None = None) -> Described | None:
    """Read ``/v1/models``; the first id without a parent is the base model's. ``None`` if it isn't understood.

    ``adapter_name`` is a further name of an adapter, made of its ``parent`` and ``id``.
    """
    try:
        models = msgspec.json.decode(body, type=_Models).data
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    cards = tuple(card for model in models if (card := _card(model, adapter_name)) is not None)
    if not cards:
        return None
    return Described(model=next((card for card in cards if card.parent is None), cards[0]).id, cards=cards)


def _card(model: _Model, adapter_name: str | None) -> Card | None:
    text, parent = _text(model.id), _text(model.parent)
    if not text:
        return None
    names = (adapter_name.format(parent=parent, id=text),) if adapter_name and parent else ()
    owner, root = _text(model.owned_by), _text(model.root, _MAX_ROOT_CHARS)
    return Card(text, _count(model.created), owner, root, parent, _count(model.max_model_len), names)


def _text(value: object, most: int = MAX_ID_CHARS) -> str | None:
    return value if isinstance(value, str) and len(value) <= most else None


def _count(value: object) -> int | None:
    return value if type(value) is int and 0 <= value < 2**63 else None
