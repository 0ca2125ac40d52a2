"""SGLang's LoRA adapters: ``/v1/models`` lists ``A``, but a request for the model ``A`` gets the base model's answer.

An adapter ``A`` of ``M`` is the model ``M:A``, or the field ``lora_path``. Source: SGLang 0.5.6 to 0.5.23
(``openai/serving_base.py``, ``_resolve_lora_path``), seen on 0.5.23. ``/v1/messages`` has no ``lora_path``, and
``/generate`` doesn't read ``model``. ``/v1/responses`` knows no adapters, whatever their name.
"""

import msgspec

from pdrouter.core.decision import Decision
from pdrouter.engines.base import Inbound, rest_without

_MODEL, _PATH = "model", "lora_path"
_BY_MODEL = "/v1/messages"
_WITHOUT = "/v1/responses"


def with_adapter(decision: Decision, inbound: Inbound, owned: frozenset[str]) -> tuple[bytes | memoryview, bytes]:
    """Return a body without the ``owned`` fields, and the field that names an adapter which is asked for by its id.

    Raises: InvalidJson, DuplicateField.
    """
    facts, endpoint = decision.facts, decision.decode.endpoint
    names, model = endpoint.names, facts.model
    if len(names) == 1 or model not in names or facts.adapter is not None:
        return inbound.rest(owned), b""
    full = f"{endpoint.model}:{model}"
    if full not in names or inbound.is_opaque or inbound.path == _WITHOUT:
        return inbound.rest(owned), b""
    field, value = (_MODEL, full) if inbound.path == _BY_MODEL else (_PATH, model)
    return rest_without(inbound.body, owned | {field}), b',"%b":%b' % (field.encode(), msgspec.json.encode(value))
