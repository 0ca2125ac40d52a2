"""A network with nothing but loopback: torch's store and Mooncake listen on every interface, and ports are ours."""

import fcntl
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Sequence

_INSIDE = "OWN_TEST_NETWORK"
_SIOCSIFFLAGS = 0x8914
_IFF_UP = 1


def enter(module: str, arguments: Sequence[str]) -> bool:
    """Run ``module`` again in a network namespace of its own, which ends with the last process in it.

    Returns only if this process is in it already (true) or may not make one (false).
    """
    if os.environ.get(_INSIDE):
        _raise_loopback()
        return True
    unshare = shutil.which("unshare")
    if unshare and subprocess.run([unshare, "--net", "true"], stderr=subprocess.DEVNULL, check=False).returncode == 0:
        os.environ[_INSIDE] = "1"
        os.execv(unshare, [unshare, "--net", sys.executable, "-m", module, *arguments])
    return False


def _raise_loopback() -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        fcntl.ioctl(control, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
