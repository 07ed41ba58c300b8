"""How a job ended: which rank failed first, with which status, and what to tell the user."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

__all__ = ["RankRecord", "Verdict", "judge"]

_RECENT_SECONDS = 10.0
_BY_FORCE = (-signal.SIGTERM, -signal.SIGKILL)
"""How mpirun and this side end ranks."""
_HINTS = (
    (
        ("not enough slots", "There are not enough slots"),
        "Say how many ranks each host takes: -H host1:2,host2:2.",
    ),
    (
        ("Permission denied (publickey", "Host key verification failed"),
        "ssh must log in to every host without a question: `ssh HOST true` (see ssh-copy-id and "
        "known_hosts; --ssh-identity-file and --ssh-port choose key and port).",
    ),
    (
        ("Could not resolve hostname", "Temporary failure in name resolution", "not known"),
        "A host name cannot be resolved: see /etc/hosts, or give addresses to -H.",
    ),
    (
        ("Connection refused", "Connection timed out", "No route to host"),
        "A host does not let ssh in: is it up, does sshd run there, is the port right?",
    ),
    (
        ("rc=127", "command not found", "No such file or directory", "failed to exec"),
        "Something is missing on another host: Python, MPI and hvdlite must lie under the same "
        "paths on all hosts.",
    ),
)


@dataclass
class RankRecord:
    """What the launcher knows of one rank."""

    host: str = "?"
    started: bool = False
    ended: float | None = None
    """When its record, or the loss of its connection, was noticed."""
    status: int | None = None
    """As subprocess has it: minus the signal where one ended it; None without a record."""
    told: bool = False
    """Whether it was asked to stop before it ended."""
    trouble: float | None = None
    """When it printed what looks like a reason to give up."""
    secondary: bool = False
    """Whether what it said is that others have gone."""

    @property
    def good(self) -> bool:
        """Whether it has said that it ended well."""
        return self.status == 0

    def describe(self) -> str:
        """Say how it ended, as in `rank 1 ended with status 3`."""
        if self.status is None:
            return "vanished without a word" if self.started else "never started"
        if self.status < 0:
            return f"was ended by {_signal_name(-self.status)}{_because(-self.status)}"
        return f"ended with status {self.status}"


@dataclass
class Verdict:
    """How a job ended."""

    status: int
    """What the launcher exits with."""
    rank: int | None = None
    """The rank that failed first, None if none did or nobody knows."""
    text: str = ""
    """What to tell the user; empty if all is well."""
    explained: bool = False
    """Whether the ranks' own words say it all, and mpirun's add nothing."""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _because(number: int) -> str:
    if number == signal.SIGKILL:
        return " (if nobody sent it, the host may have run out of memory: see dmesg)"
    if number in (signal.SIGSEGV, signal.SIGBUS):
        return (
            " (a fault in native code, which PYTHONFAULTHANDLER=1 locates, or too little "
            "/dev/shm for MPI: see `hvdlite doctor`)"
        )
    return ""


def _key(
    rank: int, record: RankRecord, stopping: float | None, here: str, first_loss: float
) -> tuple[int, bool, float, int]:
    """Order ranks by how likely they are the cause: by what they did, then by when."""
    ended = record.ended if record.ended is not None else float("inf")
    spoke = record.trouble is not None and (stopping is None or record.trouble <= stopping)
    recent = spoke and record.trouble is not None and ended - record.trouble < _RECENT_SECONDS
    when = record.trouble if recent and record.trouble is not None else ended
    by_itself = record.status is not None and not record.told and record.status != -signal.SIGTERM
    if by_itself or recent:
        # MPI libraries end those that have lost a peer, often without a word.
        kind = 2 if record.secondary or (not spoke and ended > first_loss) else 0
    elif record.status is None and (stopping is None or ended < stopping):
        kind = 1 if record.started else 3
    elif record.status is not None:
        kind = 4
    else:  # MPICH's starter kills what is left once the first has ended
        kind = 5
    # Of hosts that are gone, this one is not the first: it is here to tell.
    return kind, kind == 1 and record.host == here, when, rank


def judge(
    records: Mapping[int, RankRecord],
    np: int,
    launcher_status: int,
    *,
    launcher: str = "mpirun",
    launcher_text: str = "",
    stopping: float | None = None,
    reason: str = "",
    asked: int = 0,
    here: str = "",
    seconds: float = 0.0,
) -> Verdict:
    """Decide how a job ended.

    Args:
        records: what is known of each rank.
        np: how many there should have been.
        launcher_status: of mpirun, minus the signal where one ended it.
        launcher: what mpirun is called.
        launcher_text: what it said itself.
        stopping: when this side began to end the job, None if it did not.
        reason: why it did.
        asked: the signal by which a user asked for it; SIGKILL if ranks had to be killed then.
        here: name of the launcher's host.
        seconds: how long the job took.
    """
    everybody = {rank: records.get(rank, RankRecord()) for rank in range(np)}
    if all(record.good for record in everybody.values()):
        if launcher_status == 0 or stopping is not None:
            return Verdict(0, explained=stopping is not None)
        return Verdict(
            _exit_status(launcher_status),
            None,
            f"All {np} ranks ended well, but {launcher} itself failed: see its messages above.",
        )
    if not any(record.started for record in everybody.values()):
        return Verdict(
            _exit_status(launcher_status) or 1,
            None,
            _sentence(
                reason or f"No rank started: {launcher} ended with status {launcher_status}.",
                "Its messages are above." if launcher_text.strip() else "",
                _hint(launcher_text),
            ),
        )
    bad = [rank for rank, record in everybody.items() if not record.good]
    losses = [one.ended for one in everybody.values() if one.status is None and one.ended]
    first_loss = min(losses, default=float("inf"))
    first = min(bad, key=lambda rank: _key(rank, everybody[rank], stopping, here, first_loss))
    record = everybody[first]
    explained = record.status is not None or record.trouble is not None
    if asked:
        text = (
            "Ranks that did not end by themselves were killed." if asked == signal.SIGKILL else ""
        )
        status = record.status
        if status is None or (asked == signal.SIGINT and status == 1) or status in _BY_FORCE:
            # An interrupted Python ends with status 1 or by the signal, as its handlers may be.
            if asked == signal.SIGINT or (status is None and record.trouble is None):
                status = -asked
            elif record.trouble is not None:
                status = launcher_status
        elif status is not None and status > 0:
            text = f"Rank {first} on {record.host} {record.describe()}. {text}".rstrip()
        return Verdict(
            _exit_status(status or 0) or 1, None, _sentence(reason, text), explained=True
        )
    status = _exit_status(record.status) if record.status is not None else 0
    if record.status is None or (record.trouble is not None and record.status < 0):
        # MPI_Abort(n) ends a rank by a signal, and its status is known to mpirun only.
        status = _exit_status(launcher_status) if launcher_status > 0 else status
    return Verdict(
        status or 1,
        first,
        _sentence(reason, _what_happened(first, everybody, seconds)),
        explained,
    )


def _what_happened(first: int, everybody: Mapping[int, RankRecord], seconds: float) -> str:
    record = everybody[first]
    when = f"{seconds:.1f} s after the start"
    if record.trouble is not None and record.status in (None, *_BY_FORCE):
        return f"Rank {first} on {record.host} failed, {when}."
    mine = [r for r, one in everybody.items() if one.started and one.host == record.host]
    if record.status is None and record.started and all(everybody[r].status is None for r in mine):
        whose = "Ranks" if len(mine) > 1 else "Rank"
        return (
            f"{whose} {_listed(mine)} on {record.host} vanished without a word, {when}: the host, "
            "its network, or its MPI daemon has gone."
        )
    return f"Rank {first} on {record.host} {record.describe()}, {when}."


def _hint(text: str) -> str:
    return next((hint for signs, hint in _HINTS if any(sign in text for sign in signs)), "")


def _sentence(*parts: str) -> str:
    return " ".join(part for part in parts if part)


def _exit_status(status: int) -> int:
    return 128 - status if status < 0 else status


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:16]))
    return f"{shown} and {len(ranks) - 16} more" if len(ranks) > 16 else shown
