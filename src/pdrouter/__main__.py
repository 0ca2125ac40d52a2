"""``python -m pdrouter`` and the command ``pdrouter``.

SIGTERM is taken before anything else is imported: it has no default action in process 1 of a container.
"""

import signal
import sys
from types import FrameType


def _end(number: int, _frame: FrameType | None) -> None:
    """End with the status that a shell gives a process which a signal ended."""
    sys.exit(128 + number)


signal.signal(signal.SIGTERM, _end)  # until a command takes it

from pdrouter.cli import main  # noqa: E402

if __name__ == "__main__":
    raise SystemExit(main())
