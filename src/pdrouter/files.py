"""Reads and opens files that anybody may have put there: regular ones only, never waiting for another process."""

import errno
import os
import stat
from pathlib import Path


def read_file(path: Path, most_bytes: int) -> bytes:
    """Return the bytes of a regular file; symbolic links are followed.

    Raises: OSError if it can't be read, isn't a regular file or is longer than ``most_bytes`` (I9).
    """
    file = open_regular(path, os.O_RDONLY)
    with os.fdopen(file, "rb") as opened:
        data = opened.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise OSError(errno.EFBIG, f"longer than {most_bytes} bytes")
    return data


def open_regular(path: Path, flags: int, mode: int | None = None) -> int:
    """Open a regular file and return its descriptor; ``mode`` is what it has from then on, whatever it had before.

    Raises: OSError if it can't be opened or isn't a regular file; opening a pipe that nobody reads would wait.
    """
    try:
        file = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP and flags & os.O_NOFOLLOW:
            raise OSError(errno.ELOOP, "a symbolic link") from error
        raise
    try:
        _check_regular(file)
        if mode is not None:
            os.fchmod(file, mode)
    except BaseException:
        os.close(file)
        raise
    return file


def _check_regular(file: int) -> None:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
