"""Up to eight ranks in one process: an in-memory `Communicator` that delays what MPI may delay.

A test steps the ranks one after the other, or gives each a thread of its own where the code under
test blocks; collectives and `Test` are safe then, messages from point to point are not. Whatever
MPI leaves open, a scheduler decides: it is a callable that gets the name of an event and answers
yes or no.

- "complete": may this request, which could complete, do so in this `Test`, or this message be
  seen by this `probe`? None is refused more than `patience` times, so every delay is finite.
- "eager": is the data of this message copied when it is sent (or else when it is received)?

What MPI forbids or leaves undefined is made loud: receive buffers hold garbage until they are
complete, send buffers must still be what they were when the send completes, and collectives
must come in the same order with the same sizes on every rank.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdlite.transport.base import Pending
from hvdlite.transport.types import Array, DType, ReduceOp

__all__ = [
    "FakeCommunicator",
    "FakeWorld",
    "MPIMisuse",
    "Scheduler",
    "Stuck",
    "drive",
    "prompt",
    "random_scheduler",
    "scripted_scheduler",
]

Scheduler = Callable[[str], bool]

_GARBAGE = 0xA5


class MPIMisuse(AssertionError):
    """The code under test did what MPI forbids, or what would be a silent error there."""


class Stuck(AssertionError):
    """Nothing can move any more."""


# -- schedulers -------------------------------------------------------------------------


def prompt(event: str) -> bool:
    """Complete everything as soon as possible and copy every message when it is sent."""
    return True


def random_scheduler(seed: int) -> Scheduler:
    """Return a scheduler that tosses a coin each time."""
    source = random.Random(seed)
    return lambda event: source.random() < 0.5


def scripted_scheduler(answers: Sequence[bool]) -> Scheduler:
    """Return a scheduler that repeats a list of answers, such as hypothesis makes them."""
    script = list(answers) or [True]
    at = -1

    def schedule(event: str) -> bool:
        nonlocal at
        at = (at + 1) % len(script)
        return script[at]

    return schedule


# -- requests ---------------------------------------------------------------------------


class _Request:
    """Completes in `Test` when it can and the scheduler agrees; reports completion for ever."""

    def __init__(self, world: FakeWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.completed = False
        self._refused = 0

    def Test(self) -> bool:
        with self.world.lock:
            if self.completed:
                return True
            if self.rank in self.world.dropped or not self._ready():
                return False
            if not self._granted():
                return False
            self.completed = True
            self._complete()
            return True

    def _granted(self) -> bool:
        # A postponed completion is a change all the same: nobody is stuck.
        self.world.moves += 1
        if self._refused < self.world.patience and not self.world.scheduler("complete"):
            self._refused += 1
            return False
        return True

    def _ready(self) -> bool:
        raise NotImplementedError

    def _complete(self) -> None:
        raise NotImplementedError


class _Send(_Request):
    def __init__(self, world: FakeWorld, rank: int, data: Array, what: str) -> None:
        super().__init__(world, rank)
        self.what = what
        self.buffer = _bytes(data)
        self.sent = self.buffer.copy()
        self.eager = world.scheduler("eager")
        self.receive: _Receive | None = None
        self._announced = False

    def announced(self) -> bool:
        """Whether the receiver knows that there is a message."""
        if not self._announced:
            self._announced = self._granted()
        return self._announced

    def read(self) -> Array:
        """Return what the receiver gets: the data as sent, or as they are now."""
        if self.eager or self.completed:
            return self.sent
        return self.buffer.copy()

    def _ready(self) -> bool:
        return self.eager or self.receive is not None

    def _complete(self) -> None:
        if not np.array_equal(self.buffer, self.sent):
            raise MPIMisuse(f"{self.what}: the buffer changed before the send was complete")


class _Receive(_Request):
    def __init__(self, world: FakeWorld, rank: int, data: Array, what: str) -> None:
        super().__init__(world, rank)
        self.what = what
        self.buffer = _bytes(data, writeable=True)
        self.before = self.buffer.copy()
        self.buffer[:] = _GARBAGE
        self.send: _Send | None = None

    def _ready(self) -> bool:
        send = self.send
        if send is None:
            return False
        return send.eager or send.completed or send.rank not in self.world.dropped

    def _complete(self) -> None:
        assert self.send is not None
        message = self.send.read()
        if len(message) > len(self.buffer):
            raise MPIMisuse(
                f"{self.what}: a message of {len(message)} bytes was truncated "
                f"to {len(self.buffer)}"
            )
        if not (self.buffer == _GARBAGE).all():
            raise MPIMisuse(f"{self.what}: somebody wrote to the buffer of a pending receive")
        self.buffer[:] = self.before
        self.buffer[: len(message)] = message


@dataclass
class _Call:
    """One collective: what the ranks that have arrived gave it."""

    signature: tuple[Any, ...]
    given: dict[int, Array] = field(default_factory=dict)
    result: Any = None


class _Collective(_Request):
    def __init__(
        self,
        world: FakeWorld,
        rank: int,
        ready: Callable[[], bool],
        complete: Callable[[], None],
    ) -> None:
        super().__init__(world, rank)
        self._is_ready = ready
        self._finish = complete

    def _ready(self) -> bool:
        return self._is_ready()

    def _complete(self) -> None:
        self._finish()


# -- communicators ----------------------------------------------------------------------


class _Group:
    """What the ranks of one communicator share."""

    def __init__(self, world: FakeWorld, members: Sequence[int]) -> None:
        self.world = world
        self.members = tuple(members)
        self.size = len(members)
        self.sends: defaultdict[tuple[int, int, int], deque[_Send]] = defaultdict(deque)
        self.receives: defaultdict[tuple[int, int, int], deque[_Receive]] = defaultdict(deque)
        self.calls: list[_Call] = []
        self.called = [0] * self.size
        self.freed = [False] * self.size
        world.groups.append(self)

    def match(self, key: tuple[int, int, int]) -> None:
        sends, receives = self.sends[key], self.receives[key]
        while sends and receives:
            send, receive = sends.popleft(), receives.popleft()
            send.receive, receive.send = receive, send
            self.world.moves += 1

    def arrive(
        self, rank: int, signature: tuple[Any, ...], members: Sequence[int] | None = None
    ) -> _Call:
        """Take part in the next collective of this rank, which must be everybody's.

        Its result is a new group of `members`, if there are any.
        """
        with self.world.lock:
            call = self._arrive(rank, signature)
            if members is not None and call.result is None:
                call.result = _Group(self.world, members)
            return call

    def _arrive(self, rank: int, signature: tuple[Any, ...]) -> _Call:
        self.check(rank)
        at = self.called[rank]
        self.called[rank] += 1
        if at == len(self.calls):
            self.calls.append(_Call(signature))
        call = self.calls[at]
        if call.signature != signature:
            others = [other for other in range(self.size) if self.called[other] > at]
            others.remove(rank)
            raise MPIMisuse(
                f"collective number {at} of ranks {list(self.members)} is {signature} "
                f"on rank {self.members[rank]}, but {call.signature} "
                f"on {[self.members[other] for other in others]}"
            )
        self.world.moves += 1
        return call

    def check(self, rank: int) -> None:
        if self.freed[rank]:
            raise MPIMisuse("this communicator has been freed")
        if self.members[rank] in self.world.dropped:
            raise MPIMisuse(f"rank {self.members[rank]} was dropped, and yet it communicates")


class FakeCommunicator:
    """One rank's side of a group."""

    def __init__(self, group: _Group, rank: int) -> None:
        self._group = group
        self._rank = rank

    def __repr__(self) -> str:
        return f"FakeCommunicator(rank={self._rank}, members={list(self._group.members)})"

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._group.size

    @property
    def world(self) -> FakeWorld:
        return self._group.world

    def _name(self, rank: int) -> int:
        return self._group.members[rank]

    # -- point to point --

    def isend(self, data: Array, dest: int, tag: int) -> Pending:
        self._group.check(self._rank)
        self._check_peer(dest, tag)
        what = f"send from {self._name(self._rank)} to {self._name(dest)}, tag {tag}"
        send = _Send(self.world, self._name(self._rank), data, what)
        key = (self._rank, dest, tag)
        self._group.sends[key].append(send)
        self._group.match(key)
        return send

    def irecv(self, data: Array, source: int, tag: int) -> Pending:
        self._group.check(self._rank)
        self._check_peer(source, tag)
        what = f"receive on {self._name(self._rank)} from {self._name(source)}, tag {tag}"
        receive = _Receive(self.world, self._name(self._rank), data, what)
        key = (source, self._rank, tag)
        self._group.receives[key].append(receive)
        self._group.match(key)
        return receive

    def probe(self, source: int, tag: int) -> int | None:
        self._group.check(self._rank)
        self._check_peer(source, tag)
        sends = self._group.sends[source, self._rank, tag]
        if not sends or not sends[0].announced():
            return None
        return len(sends[0].buffer)

    def _check_peer(self, peer: int, tag: int) -> None:
        if not 0 <= peer < self.size or not 0 <= tag <= 32767:
            raise MPIMisuse(f"there is no rank {peer} or no tag {tag}")

    # -- collectives --

    def iband(self, words: Array) -> Pending:
        if words.dtype != np.uint64:
            raise MPIMisuse(f"iband of {words.dtype}")
        return self._reduce(words, ("iband", words.size), np.bitwise_and)

    def iallreduce(self, data: Array, dtype: DType, op: ReduceOp) -> Pending:
        if not self.reduces(dtype, op) or data.dtype != dtype.storage:
            raise MPIMisuse(f"iallreduce of {dtype} in {data.dtype} by {op}")
        function = {
            ReduceOp.SUM: np.add,
            ReduceOp.PRODUCT: np.multiply,
            ReduceOp.MIN: np.minimum,
            ReduceOp.MAX: np.maximum,
        }[op]
        return self._reduce(data, ("iallreduce", data.size, dtype, op), function)

    def reduces(self, dtype: DType, op: ReduceOp) -> bool:
        if dtype is DType.BOOL or dtype.is_integer:
            return op in (ReduceOp.SUM, ReduceOp.PRODUCT, ReduceOp.MIN, ReduceOp.MAX)
        if dtype in (DType.FLOAT16, DType.BFLOAT16):
            return False
        return op in (ReduceOp.SUM, ReduceOp.PRODUCT)

    def iallgather(self, send: Array, recv: Array) -> Pending:
        if recv.nbytes != send.nbytes * self.size:
            raise MPIMisuse(f"iallgather of {send.nbytes} bytes into {recv.nbytes}")
        call = self._group.arrive(self._rank, ("iallgather", send.nbytes))
        source, target = _bytes(send), _bytes(recv, writeable=True)
        call.given[self._rank] = given = source.copy()
        target[:] = _GARBAGE

        def complete() -> None:
            if not np.array_equal(source, given):
                raise MPIMisuse("the send buffer of an iallgather changed or lies in the other")
            target[:] = np.concatenate([call.given[rank] for rank in range(self.size)])

        return self._collective(lambda: len(call.given) == self.size, complete)

    def ibcast(self, data: Array, root: int) -> Pending:
        self._check_peer(root, 0)
        call = self._group.arrive(self._rank, ("ibcast", data.nbytes, root))
        target = _bytes(data, writeable=True)
        is_root = self._rank == root
        if is_root:
            call.given[root] = target.copy()
        else:
            target[:] = _GARBAGE

        def complete() -> None:
            if is_root and not np.array_equal(target, call.given[root]):
                raise MPIMisuse("the buffer of an ibcast changed on the root")
            target[:] = call.given[root]

        return self._collective(lambda: root in call.given, complete)

    def ibarrier(self) -> Pending:
        call = self._group.arrive(self._rank, ("ibarrier",))
        call.given[self._rank] = np.empty(0)
        return self._collective(lambda: len(call.given) == self.size, lambda: None)

    def _reduce(self, data: Array, signature: tuple[Any, ...], function: Any) -> Pending:
        call = self._group.arrive(self._rank, signature)
        target = _bytes(data, writeable=True)
        flat = data.reshape(-1)
        call.given[self._rank] = flat.copy()
        target[:] = _GARBAGE

        def complete() -> None:
            if call.result is None:
                call.result = call.given[0].copy()
                for rank in range(1, self.size):
                    with np.errstate(all="ignore"):
                        function(call.result, call.given[rank], out=call.result)
            flat[...] = call.result

        return self._collective(lambda: len(call.given) == self.size, complete)

    def _collective(self, ready: Callable[[], bool], complete: Callable[[], None]) -> Pending:
        return _Collective(self.world, self._name(self._rank), ready, complete)

    # -- groups --

    def duplicate(self) -> FakeCommunicator:
        call = self._group.arrive(self._rank, ("duplicate",), self._group.members)
        return FakeCommunicator(call.result, self._rank)

    def subset(self, ranks: Sequence[int]) -> FakeCommunicator | None:
        members = list(ranks)
        if len(set(members)) != len(members) or not all(0 <= r < self.size for r in members):
            raise ValueError(f"ranks {members} are not distinct ranks below {self.size}")
        names = [self._name(rank) for rank in members]
        call = self._group.arrive(self._rank, ("subset", *members), names)
        if self._rank not in members:
            return None
        return FakeCommunicator(call.result, members.index(self._rank))

    def free(self) -> None:
        self._group.freed[self._rank] = True


class FakeWorld:
    """All ranks of a job that exists only in this process.

    Args:
        size: the number of ranks.
        scheduler: decides what MPI leaves open; see the module's description.
        patience: how often one request may be held up.
    """

    def __init__(self, size: int, scheduler: Scheduler | None = None, patience: int = 8) -> None:
        self.size = size
        self.scheduler = scheduler or prompt
        self.patience = patience
        self.dropped: set[int] = set()
        self.groups: list[_Group] = []
        self.lock = threading.Lock()
        self.moves = 0
        """Counts everything that happens, so that standstill can be seen."""
        group = _Group(self, range(size))
        self.communicators = [FakeCommunicator(group, rank) for rank in range(size)]

    def drop(self, rank: int) -> None:
        """Let a rank die: nothing of it completes, and what it sent late is lost."""
        self.dropped.add(rank)
        self.moves += 1

    def check_quiet(self) -> None:
        """Check that no message and no collective was left half done.

        Raises:
            MPIMisuse: one was.
        """
        for group in self.groups:
            for kind, channels in (("sent", group.sends), ("awaited", group.receives)):
                for (source, dest, tag), queue in channels.items():
                    if queue:
                        raise MPIMisuse(
                            f"{len(queue)} messages from {group.members[source]} to "
                            f"{group.members[dest]}, tag {tag}, were {kind} and never matched"
                        )
            if len(set(group.called)) > 1:
                raise MPIMisuse(f"ranks {group.members} made {group.called} collective calls")


def _bytes(data: Array, writeable: bool = False) -> Array:
    if not isinstance(data, np.ndarray) or not data.flags.c_contiguous:
        raise MPIMisuse("only C-contiguous arrays can be communicated")
    if writeable and not data.flags.writeable:
        raise MPIMisuse("the buffer is read-only")
    return data.reshape(-1).view(np.uint8)


# -- stepping ---------------------------------------------------------------------------


def drive(
    world: FakeWorld,
    operations: Sequence[Iterable[Generator[Pending, None, Any]]],
    order: random.Random | None = None,
) -> list[list[Any]]:
    """Advance every rank's operations, all in flight at once, until they are done.

    Args:
        world: the ranks' world.
        operations: for each rank, the generators that it starts, in this order.
        order: shuffles whose turn it is; round and round without it.

    Returns:
        For each rank, what its operations returned.

    Raises:
        Stuck: nothing moves any more.
    """
    tasks = [[_Task(generator) for generator in of_rank] for of_rank in operations]
    started = [0] * len(tasks)
    alive = [rank for rank in range(len(tasks)) if rank not in world.dropped]
    idle = 0
    while any(not task.finished for rank in alive for task in tasks[rank]):
        before = world.moves
        turns = [rank for rank in alive for _ in tasks[rank]]
        if order is not None:
            order.shuffle(turns)
        moved = False
        for rank in turns:
            if started[rank] < len(tasks[rank]) and (order is None or order.random() < 0.7):
                started[rank] += 1
            unfinished = [task for task in tasks[rank][: started[rank]] if not task.finished]
            if order is not None:
                order.shuffle(unfinished)
                # The first step comes in order, whatever happens after it.
                unfinished.sort(key=lambda task: task.begun)
                fresh = [task for task in unfinished if not task.begun]
                fresh.sort(key=tasks[rank].index)
                unfinished = fresh + [task for task in unfinished if task.begun]
            for task in unfinished:
                moved |= task.step()
        idle = 0 if moved or world.moves != before else idle + 1
        if idle > 50:
            raise Stuck(
                "; ".join(
                    f"rank {rank} waits in operations "
                    f"{[i for i, task in enumerate(tasks[rank]) if not task.finished]}"
                    for rank in alive
                )
            )
    return [[task.result for task in of_rank] for of_rank in tasks]


class _Task:
    def __init__(self, generator: Generator[Pending, None, Any]) -> None:
        self.generator = generator
        self.pending: Pending | None = None
        self.begun = False
        self.finished = False
        self.result: Any = None

    def step(self) -> bool:
        """Test what the operation waits for, resume it once if that has come."""
        if self.pending is not None and not self.pending.Test():
            return False
        self.begun = True
        try:
            self.pending = next(self.generator)
        except StopIteration as end:
            self.finished, self.result = True, end.value
        return True
