"""The edge of the data plane: whatever goes wrong in a part of a request's way comes back as a RouterError."""

from collections.abc import Callable
from typing import ParamSpec

import structlog

from pdrouter.errors import InvariantViolation, RouterError

Args = ParamSpec("Args")


def attempt(call: Callable[Args, None], *args: Args.args, **kwargs: Args.kwargs) -> RouterError | None:
    """Call, and return what went wrong; a fault of our own is logged and named by its type alone."""
    try:
        call(*args, **kwargs)
    except RouterError as error:
        return error.with_traceback(None)  # or the error and its frames would hold each other
    except Exception as error:  # noqa: BLE001
        structlog.stdlib.get_logger("pdrouter.edge").exception("internal error")
        return InvariantViolation(f"internal error: {type(error).__name__}")
    return None
