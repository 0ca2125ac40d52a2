"""Numbers and booleans as engines read them: by pydantic's lax mode, which takes several spellings.

Source: pydantic 2, conversion table, lax mode; tests/proxy/test_scalars.py holds both readers to the same values.
"""

from pdrouter.errors import InvalidRequest

Scalar = bool | int | float | str | None
"""What JSON may say where a number or a boolean is expected."""

MAX_INTEGER = 2**63 - 1
"""Larger numbers fit no engine's counters; chosen."""

_MAX_CHARS = 64
"""Longer texts of numbers aren't read; chosen."""

_TRUE = frozenset(("1", "on", "t", "true", "y", "yes"))
_FALSE = frozenset(("0", "off", "f", "false", "n", "no"))


def integer(name: str, value: Scalar) -> int | None:
    """Return the integer that a field says, ``None`` where it is null or missing.

    Raises: InvalidRequest.
    """
    number = value if value is None or type(value) is int else _integer(value)
    if number is None and value is not None:
        raise InvalidRequest(f"{name} must be an integer", param=name)
    if number is not None and not -MAX_INTEGER <= number <= MAX_INTEGER:
        raise InvalidRequest(f"{name} is out of range", param=name)
    return number


def count(name: str, value: Scalar) -> int | None:
    """Return the integer that a field says, which can't be negative; ``None`` where it is null or missing.

    Raises: InvalidRequest.
    """
    if value is None or (type(value) is int and 0 <= value <= MAX_INTEGER):
        return value
    number = integer(name, value)
    if number is not None and number < 0:
        raise InvalidRequest(f"{name} must be at least 0", param=name)
    return number


def boolean(name: str, value: Scalar) -> bool:
    """Return the boolean that a field says; null and a missing one are false.

    Raises: InvalidRequest.
    """
    if value is None or isinstance(value, bool):
        return bool(value)
    word = value.lower() if isinstance(value, str) else str(int(value)) if value in (0, 1) else ""
    if word not in _TRUE and word not in _FALSE:
        raise InvalidRequest(f"{name} must be true or false", param=name)
    return word in _TRUE


def _integer(value: Scalar) -> int | None:
    """Return the integer that a text, a boolean or a float stands for, ``None`` if it stands for none."""
    if isinstance(value, str):
        return _integer_of(value)
    return int(value) if value is not None and value == int(value) else None


def _integer_of(text: str) -> int | None:
    """Return the integer that a text writes: with a sign, single underscores, or a fraction of zeros."""
    text = text.strip()
    whole, point, fraction = text.partition(".")
    is_number = len(text) <= _MAX_CHARS and text.isascii() and not whole[-1:].isspace()
    if not is_number or (point and (not fraction or fraction.strip("0"))):
        return None
    try:
        return int(whole)
    except ValueError:
        return None
