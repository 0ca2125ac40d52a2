"""Files that anybody may have put there: read whole, within a limit, and never waited for."""

import os
import stat
from pathlib import Path

import pytest

from pdrouter.files import open_regular, read_file


def test_a_file_and_a_link_to_it(tmp_path: Path) -> None:
    """Are read to their last byte; one byte more than the limit is too much."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_bytes(b"x" * 10)
    link.symlink_to(file)
    assert read_file(file, 10) == read_file(link, 10) == b"x" * 10
    with pytest.raises(OSError, match="longer than 9 bytes"):
        read_file(file, 9)


def test_no_file(tmp_path: Path) -> None:
    """A pipe without a writer, a folder, a device without an end, nothing at all."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero")):
        with pytest.raises(OSError, match="not a regular file"):
            read_file(path, 10)
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(OSError):  # noqa: PT011
            read_file(path, 10)


def test_a_mode_is_set_on_what_was_there(tmp_path: Path) -> None:
    """Only if it is a file of its own where links aren't followed."""
    file, link = tmp_path / "file", tmp_path / "link"
    file.touch(0o644)
    link.symlink_to(file)
    with pytest.raises(OSError, match="a symbolic link"):
        open_regular(link, os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    assert stat.S_IMODE(file.stat().st_mode) == 0o644
    os.close(open_regular(file, os.O_WRONLY | os.O_NOFOLLOW, 0o600))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
