"""A stand-in for a node or server, told by its first argument what to do; writes events like the real ones."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from spes_core.events import EventWriter


def describe() -> None:
    """Print how this process was started."""
    print(f"group leader: {os.getpgid(0) == os.getpid()}, session leader: {os.getsid(0) == os.getpid()}")
    print(f"stdin: {sys.stdin.read()!r}, arguments: {sys.argv[2:]}, FOO: {os.environ.get('FOO')!r}")
    print(f"bytecode may be written: {not sys.dont_write_bytecode}")
    print("to stderr: ü", file=sys.stderr)


def leave_orphan() -> None:
    """Start a child in a session of its own, as torchrun does with ranks, say its pid and end or stay."""
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(sys.argv[2]).write_text(str(child.pid))
    if "--stay" in sys.argv:
        time.sleep(300)


def train(losses: tuple[float, ...] = (1.0, 2.0)) -> None:
    """Write the events of a few steps as node ``argv[2]`` of the run whose run.json is ``argv[3]``."""
    events = EventWriter(Path(sys.argv[3]).parent / "events" / f"{sys.argv[2]}.jsonl")
    events.write("first_step")
    for step, loss_nats in enumerate(losses, start=1):
        events.write("train", step=step, loss_nats=loss_nats, tokens_per_s=10.0, **dict.fromkeys(_ZEROS, 0.0))
        time.sleep(0.1)


_ZEROS = ("grad_norm", "learning_rate", "step_time_s", "z_loss", "balance_loss", "router_z_loss")


def main() -> None:
    action = sys.argv[1]
    if action == "describe":
        describe()
    elif action == "exit":
        sys.exit(int(sys.argv[2]))
    elif action == "complain":
        print("something\nerror: the corpus is empty", file=sys.stderr)
        sys.exit(1)
    elif action == "raise":
        raise RuntimeError("broken")
    elif action == "segfault":
        os.kill(os.getpid(), signal.SIGSEGV)
    elif action == "sleep":
        time.sleep(300)
    elif action == "ignore-sigterm":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready")
        time.sleep(300)
    elif action == "fail-later":
        time.sleep(0.5)
        sys.exit("error: a consequence")
    elif action == "orphan":
        leave_orphan()
    elif action == "train":
        train()
    elif action == "explode":
        print("about to explode")
        train((1.0, 9.0, 9.0, 1.0))
        time.sleep(float(sys.argv[4]))
    elif action == "hoard":
        hoard = b"x" * int(sys.argv[2])
        time.sleep(300)
        print(len(hoard))
    elif action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
