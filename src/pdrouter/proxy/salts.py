"""[1] A salt for each tenant: engines and the router's own index share no prompt's KV between two tenants.

Whether a prefix was read before is visible in the time to the first token, so one tenant could try what another wrote.
The router writes the field, as a client that chose it could take another's. Read next: ``intake.py``.
"""

from collections.abc import Sequence
from hashlib import blake2b

from msgspec import UNSET, Raw
from msgspec.structs import replace

from pdrouter.engines.base import rest_without, splice
from pdrouter.proxy.bodies import AnyBody, Api
from pdrouter.proxy.content import value

_DIGEST_BYTES = 16
_PERSON = b"pdrouter-salt"

_SALT: Sequence[str] = ("cache_salt",)
"""Source: SGLang 0.5.6 and later, ``openai/protocol.py``; vLLM 0.32.0, ``openai/*/protocol.py`` and
``anthropic/protocol.py``, with 128 characters at most and no ``@``, ``/`` or backslash. Up to 0.5.17 SGLang puts it
before ``extra_key`` to make one key of both (``serving_base.py``): its length is fixed so that none is like another's.
"""

_EXTRA: Sequence[str] = ("extra_key", "cache_salt")
"""Source: SGLang's ``/generate`` knows ``extra_key`` since 0.5.6, ``cache_salt`` since 0.5.18 (``io_struct.py``)."""


def salted(api: Api, body: bytes, told: AnyBody, tenant: bytes) -> tuple[bytes, AnyBody]:
    """Return a body with its tenant's salt, and what it says then.

    What the client itself gave counts within its tenant's. A body that has its tenant's salt is returned as it is.
    Raises: InvalidJson, DuplicateField.
    """
    fields = _EXTRA if api is Api.GENERATE else _SALT
    own, given = _digest(tenant), [getattr(told, field) for field in fields]
    raws = [bytes(value(field) or b"") for field in given]
    if raws[0].startswith(b'"' + own) and not any(raws[1:]):
        return body, told
    salt = b'"%b"' % (own + _digest(b"\0".join(raws)) if any(raws) else own)
    is_clean = all(field is UNSET for field in given)
    rest = memoryview(body)[body.index(b"{") + 1 :] if is_clean else rest_without(body, frozenset(fields))
    told = replace(told, **dict.fromkeys(fields, UNSET) | {fields[0]: Raw(salt)})
    return b"".join(splice(rest, b'"%b":%b' % (fields[0].encode(), salt))), told


def _digest(text: bytes) -> bytes:
    """Return a name for it from which it can't be read: the same in each router, so that caches outlive a restart."""
    return blake2b(text, digest_size=_DIGEST_BYTES, person=_PERSON).hexdigest().encode()
