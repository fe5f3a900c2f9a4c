"""Runs a module on a host of the testbed, as `python -m` would: `python -m tests.multihost.on_host NAMESPACE MODULE`.

From a fork server, which has torch loaded, a process on a host starts in milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
from pathlib import Path

_NEW_NET = 0x40000000


def main() -> None:
    namespace, module, *arguments = sys.argv[1:]
    with Path("/run/netns", namespace).open() as file:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.setns(file.fileno(), _NEW_NET):
            sys.exit(f"{namespace} cannot be entered: {os.strerror(ctypes.get_errno())}")
    sys.argv = [module, *arguments]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
