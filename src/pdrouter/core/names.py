"""Which names a request may use for a model, and which endpoints know each name.

An engine lists ids: its base model, aliases of it, LoRA adapters. Each name is found by one look into a dict, whatever
the fleet. Readiness is the fleet's (``fleet.py``).
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping

import msgspec

from pdrouter.errors import ModelNotFound

_MAX_NAMED = 16
"""Base models that an error message lists."""

MAX_SHOWN_CHARS = 256
"""Characters of an unknown name that an error message repeats."""


class Card(msgspec.Struct, frozen=True):
    """What an engine tells of one id in ``/v1/models``; ``None`` where it doesn't.

    ``parent`` is the model that an adapter belongs to. ``names`` are further names for the same id.
    """

    id: str
    created: int | None = None
    owned_by: str | None = None
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None
    names: tuple[str, ...] = ()


def renewed(known: Iterable[Card], listed: Iterable[Card]) -> tuple[Card, ...]:
    """Return the cards as they are listed now; one that is known keeps the time at which it was created.

    Source: vLLM 0.32 and SGLang 0.5.23 write the present time into ``created`` of each reply.
    """
    created = {card.id: card.created for card in known}
    return tuple(msgspec.structs.replace(card, created=created.get(card.id, card.created)) for card in listed)


def names_of(base: str | None, cards: Iterable[Card]) -> Mapping[str, str | None]:
    """Return each name that an endpoint knows, with the adapter that it stands for, ``None`` for the base model."""
    names: dict[str, str | None] = {}
    for card in cards:
        adapter = None if card.parent is None else card.id
        names |= dict.fromkeys((card.id, *card.names), adapter)
    if base is not None:
        names[base] = None
    return names


class Target(msgspec.Struct, frozen=True):
    """What a name stands for.

    ``name`` is what an endpoint must serve, ``None`` where any will do. ``base`` is the model that serves it, ``None``
    if several have the name, or if it isn't known. ``line`` is the model in whose line it waits, ``None``: that of all.
    """

    name: str | None = None
    base: str | None = None
    line: str | None = None


class _Name:
    """A name: the endpoints that list it, and how many for each base model; ``adapter`` is the id of an adapter."""

    __slots__ = ("adapter", "bases", "holders", "is_partial", "target", "version")

    def __init__(self, adapter: str | None) -> None:
        self.adapter = adapter
        self.holders: dict[str, None] = {}
        self.bases: Counter[str] = Counter()
        self.target = Target()
        self.is_partial = False
        self.version = -1


class Names:
    """All names of a fleet. ``takes_any``: where all endpoints have one base model, a name not listed is theirs, too.

    ``version`` grows when anything changes.
    """

    def __init__(self, *, takes_any: bool) -> None:
        self.version = 0
        self._takes_any = takes_any
        self._names: dict[str, _Name] = {}
        self._bases: Counter[str] = Counter()
        self._listed: dict[str, tuple[str, tuple[Card, ...]]] = {}

    @property
    def bases(self) -> Collection[str]:
        """The base models."""
        return self._bases.keys()

    def put(self, address: str, base: str | None, cards: tuple[Card, ...]) -> None:
        """Take in what an endpoint lists now; without a base model nothing is known of it."""
        if self._listed.get(address) == (base, cards):
            return
        self.remove(address)
        if base is None:
            return
        self._listed[address] = (base, cards)
        self._bases[base] += 1
        for text, adapter in names_of(base, cards).items():
            name = self._names.get(text)
            if name is None:
                name = self._names[text] = _Name(adapter)
            name.holders[address] = None
            name.bases[base] += 1
        self.version += 1

    def remove(self, address: str) -> None:
        """Forget what an endpoint lists."""
        if address not in self._listed:
            return
        base, cards = self._listed.pop(address)
        for text in names_of(base, cards):
            name = self._names[text]
            del name.holders[address]
            _take_one(name.bases, base)
            if not name.holders:
                del self._names[text]
        _take_one(self._bases, base)
        self.version += 1

    def partial_holders(self, text: str) -> Collection[str]:
        """Return the addresses of the endpoints that list a name, if others of the same base model don't."""
        name = self._known(text) if text in self._names else None
        return name.holders.keys() if name is not None and name.is_partial else ()

    def target(self, model: str | None, adapter: str | None) -> Target:
        """Return what a request's model stands for; ``adapter`` is one that the request names beside the model.

        Raises: ModelNotFound.
        """
        text, _ = self._find(model, adapter)
        if text is not None:
            return self._known(text).target
        if model is None or not self._bases or (self._takes_any and len(self._bases) == 1):
            return Target(base=self._only)
        bases = sorted(self._bases)
        more = f" and {len(bases) - _MAX_NAMED} more" if len(bases) > _MAX_NAMED else ""
        known = ", ".join(bases[:_MAX_NAMED]) + more
        raise ModelNotFound(f"the model {model[:MAX_SHOWN_CHARS]!r} is not served; known: {known}", param="model")

    def base(self, model: str | None, adapter: str | None) -> str | None:
        """Return the base model that serves a request, ``None`` if that isn't known."""
        text, _ = self._find(model, adapter)
        return self._only if text is None else self._known(text).target.base

    def cache_key(self, model: str | None, adapter: str | None) -> str:
        """Return what separates the KV of prompts: the base model, whatever name it has, and the adapter."""
        text, adapter = self._find(model, adapter)
        base = (self._only if text is None else self._known(text).target.base) or text or model or ""
        return base if adapter is None else f"{base}\0{adapter}"

    @property
    def _only(self) -> str | None:
        """The base model of all endpoints, if they have one."""
        return next(iter(self._bases)) if len(self._bases) == 1 else None

    def _find(self, model: str | None, beside: str | None) -> tuple[str | None, str | None]:
        """Return the listed name that a request is for, ``None`` if there is none, and the adapter.

        With an adapter that nobody lists it is the base model's: an engine may load the adapter when it is asked for.
        Source: SGLang 0.5.23 (``serving_base.py``: an adapter in the model's name comes before ``lora_path``;
        ``tokenizer_manager.py``: an adapter that was evicted isn't listed, and is loaded again).
        """
        names = self._names
        name = None if model is None else names.get(model)
        if name is not None and (beside is None or name.adapter is not None):
            return model, name.adapter
        if beside is not None:
            for text in (f"{model}:{beside}", *(() if name is not None else (beside,))):
                if text in names:
                    return text, names[text].adapter
            return (None if name is None else model), beside
        if model is None or ":" not in model:
            return None, None
        bases = (model.rpartition(":")[0], model.partition(":")[0])
        return next((base for base in bases if base in names), None), model

    def _known(self, text: str) -> _Name:
        """Return what is known of a name that is listed."""
        name = self._names[text]
        if name.version != self.version:
            name.version = self.version
            base = next(iter(name.bases)) if len(name.bases) == 1 else None
            name.is_partial = base is None or name.bases[base] < self._bases[base]
            line = None if len(self._bases) == 1 else base
            name.target = Target(text if name.is_partial else line, base, line)
        return name


def _take_one(counts: Counter[str], key: str) -> None:
    counts[key] -= 1
    if not counts[key]:
        del counts[key]
