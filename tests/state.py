"""The whole state of an object as a value that can be compared: what it refers to, to any depth."""

import enum
import random
from collections import deque
from collections.abc import Collection, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import msgspec

CACHES = frozenset({("Fleet", name) for name in ("_ways", "_alone", "_ready", "_partners", "_models")})
"""What a question may fill: answers that are remembered until something changes."""

_ATOMS = (type(None), bool, int, float, complex, str, bytes, enum.Enum, type, ModuleType, FunctionType)
_CALLABLES = (MethodType, BuiltinFunctionType)


def state_of(root: object, caches: Collection[tuple[str, str]] = CACHES) -> list[object]:
    """Return all that ``root`` reaches, in the order of first sight; equal states are equal lists."""
    seen: dict[int, int] = {}
    kept: list[object] = []  # no id is given twice while the walk goes on
    found: list[tuple[str, list[tuple[str, object]]]] = []
    waiting = deque([root])
    while waiting:
        one = waiting.popleft()
        if id(one) in seen:
            continue
        seen[id(one)] = len(seen)
        kept.append(one)
        parts = list(_parts(one, caches))
        kept += [part for _, part in parts]
        waiting += [part for _, part in parts if not isinstance(part, (*_ATOMS, *_CALLABLES))]
        found.append((type(one).__name__, parts))
    return [(kind, [(name, _shown(part, seen)) for name, part in parts]) for kind, parts in found]


def _shown(part: object, seen: Mapping[int, int]) -> object:
    if isinstance(part, _CALLABLES):
        return part.__name__
    return part if isinstance(part, _ATOMS) else ("object", seen[id(part)])


def _parts(one: Any, caches: Collection[tuple[str, str]]) -> Any:
    if isinstance(one, random.Random):
        yield "state", one.getstate()
        return
    if isinstance(one, Mapping):
        for number, (key, value) in enumerate(one.items()):
            yield f"key {number}", key
            yield f"value {number}", value
    elif isinstance(one, set | frozenset):
        yield "members", tuple(sorted(one, key=repr))
    elif isinstance(one, list | tuple | deque):
        yield from ((f"item {number}", item) for number, item in enumerate(one))
    names = set(getattr(one, "__dict__", ()))
    for kind in type(one).__mro__:
        slots = vars(kind).get("__slots__", ())
        names |= {slots} if isinstance(slots, str) else set(slots)
    if isinstance(one, msgspec.Struct):
        names |= set(one.__struct_fields__)
    for name in sorted(names - {"__dict__", "__weakref__"}):
        if (type(one).__name__, name) not in caches and hasattr(one, name):
            yield name, getattr(one, name)
