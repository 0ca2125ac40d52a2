"""The key that a client sends, in any of its spellings, and what tells one client from another.

Whoever compares or counts keys uses ``credential()``, so that one key has one spelling. It knows no settings.
"""

from collections.abc import Collection, Iterable, Mapping

from pdrouter.errors import InvalidRequest

AUTHORIZATION = b"authorization"
API_KEY = b"x-api-key"

_BEARER = b"bearer"


def bare_key(value: bytes) -> bytes:
    """Return the key of an ``authorization`` value: what follows ``Bearer``, or another scheme and what follows that.

    Source: RFC 9110, 11.4: a scheme is case-insensitive, and one space or several follow it.
    """
    scheme, _, key = value.strip().partition(b" ")
    key = key.lstrip()
    return key if scheme.lower() == _BEARER else b"%b %b" % (scheme, key)


def credential(header: Mapping[bytes, bytes]) -> bytes:
    """Return the key that a request brings, empty if none; ``x-api-key`` counts where there is no ``authorization``.

    Only one of them counts, or a client could be checked by the one and be counted by the other.
    """
    given = header.get(AUTHORIZATION)
    return bare_key(given) if given else header.get(API_KEY, b"").strip()


def identity(header: Mapping[bytes, bytes], name: bytes) -> bytes:
    """Return what the header ``name`` says of who the client is, empty if nothing."""
    return credential(header) if name in (AUTHORIZATION, API_KEY) else header.get(name, b"")


def check_once(headers: Iterable[tuple[bytes, bytes]], names: Collection[bytes]) -> None:
    """Refuse a request that carries one of these headers twice: two readers could take different ones.

    Raises: InvalidRequest.
    """
    found: set[bytes] = set()
    for name, _ in headers:
        if name in found:
            raise repeated(name)
        if name in names:
            found.add(name)


def repeated(name: bytes) -> InvalidRequest:
    """Return what to say of a header that stands twice and may not."""
    text = name.decode("latin-1")
    return InvalidRequest(f"the header {text} stands twice; send it once", param=text)
