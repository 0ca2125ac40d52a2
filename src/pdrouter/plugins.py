"""Policies from other packages: those announced under the entry point group ``pdrouter.policies``.

It must not know what a policy is; the core gets what was found as a table. ``examples/`` has a package to start from.
"""

from collections.abc import Callable, Collection, Mapping
from importlib.metadata import EntryPoint, entry_points

from pdrouter.errors import FOREIGN_FAULTS, ConfigError

GROUP = "pdrouter.policies"

Maker = Callable[[object], object]
"""Makes a policy of the core's ``PolicyOptions``."""


def policy_names() -> list[str]:
    """Return the names that are announced; nothing is loaded."""
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def load_policies(shipped: Collection[str]) -> Mapping[str, Maker]:
    """Load all that are announced.

    Raises: ConfigError with a line for each that can't be loaded or has a name that is taken.
    """
    found: dict[str, Maker] = {}
    problems: list[str] = []
    for entry in sorted(entry_points(group=GROUP), key=lambda entry: (entry.name, entry.value)):
        try:
            if entry.name in shipped:
                raise ValueError(f"pdrouter has a policy {entry.name} itself; choose another name")
            if entry.name in found:
                raise ValueError("another package has a policy of that name")
            found[entry.name] = _maker(entry, entry.load())
        except FOREIGN_FAULTS as error:
            problems.append(_problem(entry, error))
    if problems:
        raise ConfigError(problems)
    return found


def _maker(entry: EntryPoint, make: object) -> Maker:
    """Return what makes the policy, and says clearly when it doesn't."""
    if not callable(make):
        raise TypeError("it is neither a class nor a function that makes a policy")

    def checked(options: object) -> object:
        try:
            policy = make(options)
            if not callable(getattr(policy, "choose", None)):
                raise TypeError("what it makes has no method choose(question, candidates)")
        except FOREIGN_FAULTS as error:
            raise ConfigError([_problem(entry, error)]) from error
        return policy

    return checked


def _problem(entry: EntryPoint, error: Exception) -> str:
    package = entry.dist.name if entry.dist is not None else "an unknown package"
    what = " ".join(str(error).split())
    return f"policy {entry.name} of {package} ({entry.value}): {type(error).__name__}: {what}"
