"""Every exception that spes_core raises on purpose, in one tree.

::

    SpesError
    ├── ConfigError (ValueError)     a setting is wrong; carries every problem found, each with its path
    ├── DataError (ValueError)       a corpus or shard cannot be read, is empty, or is too small
    ├── ProtocolError                what came over the wire breaks a rule; the sender is named
    │   ├── Damaged                  a frame was changed on its way; it is sent again
    │   └── Refused                  the server refused what this node asked for, and says why
    │       └── StaleRound           the round is over: the node must go on from the newest one
    ├── Unreachable                  the server could not be reached for as long as round.retry_s allows
    ├── Diverged                     the loss is no longer finite
    ├── Unencodable (ValueError)     a tensor's change is NaN, infinite or too large to travel
    └── RoundFailed                  a round could not be completed; names the nodes that were missing
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path


class SpesError(Exception):
    """Root of the errors that a user can act on."""


@dataclass(frozen=True)
class Problem:
    """One thing wrong with a configuration.

    ``path`` is the dotted path of the setting ("model.top_k"); ``message`` gives the value, the rule and the
    next move, without repeating the path.
    """

    path: str
    message: str

    def __str__(self) -> str:
        text = f"{self.path} {self.message}" if self.path else self.message
        return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


class ConfigError(SpesError, ValueError):
    """One or more settings are wrong; ``problems`` lists all of them, not only the first."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        assert self.problems
        super().__init__("\n".join(str(problem) for problem in self.problems))


class DataError(SpesError, ValueError):
    """A corpus, tokenizer or shard cannot be used."""


class ProtocolError(SpesError):
    """A peer sent something that breaks the protocol."""


class Damaged(ProtocolError):
    """The checksum of a frame is wrong."""


class Refused(ProtocolError):
    """The server refused a request of this node."""


class StaleRound(Refused):
    """A round is over without this node: what it uploads for it comes too late."""


class Unreachable(SpesError):
    """The peer cannot be reached, went away and did not come back in time, or its answer was given up on."""


class Diverged(SpesError):
    """The loss is no longer a finite number."""


class Unencodable(SpesError, ValueError):
    """Values that no codec can send: NaN, infinite or huge."""


class RoundFailed(SpesError):
    """A round could not be completed."""


def file_failure(folder: Path, error: OSError) -> str:
    """What to say when a process could not read or write a file of the run in ``folder``."""
    return (
        f"a file of the run in {folder} cannot be read or written: {error}; mend that (free space, permissions) and"
        " start this process again: it goes on from what is stored"
    )
