"""Random schedules on an in-memory communicator end as a sequential model says.

Each rank submits its collectives in an order of its own, some differ between ranks, some are
of process sets, some ranks stop early and join; messages take as long as they like. The model
knows nothing of rounds: it computes each collective from what the ranks put in.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdlite.autotune import Parameters
from hvdlite.engine.engine import GLOBAL_SET, Engine
from hvdlite.engine.negotiation import JOIN_KEY
from hvdlite.engine.requests import Kind, Request
from hvdlite.engine.submissions import Handle
from hvdlite.exceptions import MismatchError
from hvdlite.settings import Settings
from hvdlite.transport.auto import make_transport
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, random_scheduler

SHAPES = [(0,), (), (1,), (3,), (2, 3), (5,)]


@dataclass
class Op:
    """One collective of the script, and how a rank may get it wrong."""

    kind: Kind
    shape: tuple[int, ...]
    named: bool
    op: ReduceOp = ReduceOp.SUM
    root: int = 0
    set_ranks: tuple[int, ...] | None = None
    """None: all ranks."""
    odd_rank: int | None = None
    """The rank that asks for something else."""
    odd: str = "shape"


@dataclass
class Rank:
    engine: Engine
    handles: dict[object, Handle] = field(default_factory=dict)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def value(rank: int, index: int, epoch: int, shape: tuple[int, ...]) -> np.ndarray:
    count = int(np.prod(shape))
    return (np.arange(count, dtype=np.float64) % 5 + rank + 2 * index + epoch).reshape(shape)


def rows_shape(op: Op, rank: int) -> tuple[int, ...]:
    return (op.shape[0] + rank % 2, *op.shape[1:]) if op.kind is Kind.ALLGATHER else op.shape


def members(op: Op, size: int) -> tuple[int, ...]:
    return op.set_ranks or tuple(range(size))


def request_of(op: Op, rank: int, size: int) -> tuple[Request, tuple[int, ...]]:
    shape = rows_shape(op, rank)
    dtype, reduce_op, kind = DType.FLOAT64, op.op, op.kind
    if rank == op.odd_rank:
        if op.odd == "shape":
            shape = (*shape, 2)
        elif op.odd == "dtype":
            dtype = DType.FLOAT32
        elif op.odd == "op":
            reduce_op = ReduceOp.MIN if op.op is not ReduceOp.MIN else ReduceOp.SUM
        else:
            kind = Kind.BROADCAST if op.kind is not Kind.BROADCAST else Kind.ALLREDUCE
    ranks = members(op, size)
    splits: tuple[int, ...] = ()
    if kind is Kind.ALLTOALL:
        share = [shape[0] // len(ranks)] * len(ranks)
        share[rank % len(ranks)] += shape[0] % len(ranks)
        splits = tuple(share)
    root = op.root if kind is Kind.BROADCAST else -1
    return Request(kind, (dtype,), (shape,), reduce_op, root, splits=splits), shape


def submit(state: Rank, rank: int, size: int, index: int, op: Op, epoch: int, set_id: int) -> None:
    request, shape = request_of(op, rank, size)
    data = value(rank, index, epoch, shape).astype(request.dtypes[0].storage)
    keeps = request.kind in (Kind.ALLREDUCE, Kind.BROADCAST)
    outputs = [np.empty_like(data) if keeps else None]
    name = f"op{index}" if op.named else None
    handle = state.engine.submit(set_id, request, name, [data], outputs)
    state.handles[epoch, index] = handle


def expected(op: Op, index: int, epoch: int, size: int, submitted: set[int]) -> dict:
    """Return per rank the array it must get, or MismatchError."""
    ranks = members(op, size)
    here = [r for r in ranks if r in submitted]
    absent = [r for r in ranks if r not in submitted]
    requests = {r: request_of(op, r, size)[0] for r in here}
    wrong = op.odd_rank in here and len(here) > 1
    wrong |= bool(absent) and requests[here[0]].kind is Kind.ALLTOALL
    is_broadcast = requests[here[0]].kind is Kind.BROADCAST
    wrong |= is_broadcast and ranks[op.root] in absent
    if wrong:
        return dict.fromkeys(here, MismatchError)
    arrays = {r: value(r, index, epoch, request_of(op, r, size)[1]) for r in here}
    kind, reduce_op = requests[here[0]].kind, requests[here[0]].op
    if requests[here[0]].dtypes[0] is DType.FLOAT32:
        arrays = {r: a.astype(np.float32) for r, a in arrays.items()}
    stack = list(arrays.values())
    if kind is Kind.ALLGATHER:
        return dict.fromkeys(here, np.concatenate(stack))
    if kind is Kind.BROADCAST:
        return dict.fromkeys(here, arrays[ranks[op.root]])
    if kind is Kind.ALLTOALL:
        result = {}
        for me in here:
            parts = []
            for r in here:
                starts = np.cumsum([0, *requests[r].splits])
                at = ranks.index(me)
                parts.append(arrays[r][starts[at] : starts[at + 1]])
            result[me] = np.concatenate(parts)
        return result
    total = {
        ReduceOp.SUM: lambda: sum(stack[1:], stack[0]),
        ReduceOp.AVERAGE: lambda: sum(stack[1:], stack[0]) / len(ranks),
        ReduceOp.MIN: lambda: np.minimum.reduce(stack),
        ReduceOp.MAX: lambda: np.maximum.reduce(stack),
        ReduceOp.PRODUCT: lambda: np.multiply.reduce(stack),
    }[reduce_op]()
    if kind is Kind.ALLREDUCE:
        return dict.fromkeys(here, total)
    pieces = np.array_split(total, len(ranks))
    return {r: pieces[ranks.index(r)] for r in here}


@st.composite
def scripts(draw):
    size = draw(st.integers(2, 5))
    sets = draw(
        st.lists(
            st.sets(st.integers(0, size - 1), min_size=1, max_size=size - 1).map(
                lambda s: tuple(sorted(s))
            ),
            max_size=2,
            unique=True,
        )
    )
    ops = []
    for _ in range(draw(st.integers(1, 7))):
        kind = draw(
            st.sampled_from(
                [
                    Kind.ALLREDUCE,
                    Kind.ALLREDUCE,
                    Kind.ALLREDUCE,
                    Kind.ALLGATHER,
                    Kind.BROADCAST,
                    Kind.ALLTOALL,
                    Kind.REDUCESCATTER,
                ]
            )
        )
        shape = draw(st.sampled_from(SHAPES))
        if kind not in (Kind.ALLREDUCE, Kind.BROADCAST) and not shape:
            shape = (4,)
        set_ranks = draw(st.sampled_from([None, None, *sets]))
        ranks = set_ranks or tuple(range(size))
        reduces = kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
        op = Op(
            kind,
            shape,
            named=draw(st.booleans()),
            op=draw(st.sampled_from([o for o in ReduceOp if o is not ReduceOp.ADASUM]))
            if reduces
            else ReduceOp.SUM,
            root=draw(st.integers(0, len(ranks) - 1)) if kind is Kind.BROADCAST else 0,
            set_ranks=set_ranks,
            odd_rank=draw(st.sampled_from([None, None, None, *ranks])),
            odd=draw(
                st.sampled_from(["shape", "dtype"] + ["op", "kind"] * (kind is Kind.ALLREDUCE))
            ),
        )
        if op.odd == "shape" and kind is not Kind.ALLREDUCE and kind is not Kind.BROADCAST:
            op.odd = "dtype"
        ops.append(op)
    epochs = draw(st.integers(1, 3))
    stops = [
        draw(st.one_of(st.none(), st.lists(st.integers(0, len(ops)), min_size=size, max_size=size)))
        for _ in range(epochs)
    ]
    return size, sets, ops, stops


def run_script(size, sets, ops, stops, capacity, threshold, seed):
    source = random.Random(seed)
    world = FakeWorld(size, random_scheduler(seed))
    data_comms = [comm.duplicate() for comm in world.communicators]
    clock = Clock()
    parameters = Parameters(threshold, 0.001, capacity, "auto")
    states = [
        Rank(
            Engine(
                world.communicators[r],
                data_comms[r],
                lambda comm, ranks: make_transport(comm, Settings()),
                parameters,
                clock=clock,
            )
        )
        for r in range(size)
    ]
    set_ids: dict[tuple[int, ...] | None, int] = {None: GLOBAL_SET}
    for ranks in sets:
        set_ids[ranks] = {state.engine.add_process_set(ranks) for state in states}.pop()
    submitted: dict[tuple[int, int], set[int]] = {}

    def plan_epoch(rank: int, epoch: int) -> list:
        """Return what a rank submits: unnamed in the common order, named anywhere between."""
        stop = stops[epoch]
        limit = len(ops) if stop is None else stop[rank]
        mine = [
            (i, op)
            for i, op in enumerate(ops)
            if rank in members(op, size) and (op.set_ranks is not None or i < limit)
        ]
        unnamed = [item for item in mine if not item[1].named]
        order = [item for item in mine if item[1].named]
        source.shuffle(order)
        for _ in unnamed:
            order.insert(source.randint(0, len(order)), None)
        rest = iter(unnamed)
        order = [next(rest) if item is None else item for item in order]
        for i, _ in order:
            submitted.setdefault((epoch, i), set()).add(rank)
        return order + ([None] if stop is not None else [])

    todo = [
        [(e, item) for e in range(len(stops)) for item in plan_epoch(r, e)] for r in range(size)
    ]
    steps = 0

    def may_submit(rank: int) -> bool:
        if not todo[rank]:
            return False
        epoch = todo[rank][0][0]
        # A name can be used again, and the next epoch begins, once the last one is complete.
        return (
            all(handle.done() for key, handle in states[rank].handles.items() if key[0] < epoch)
            and (epoch, "join") not in states[rank].handles
        )

    while any(todo) or not all(h.done() for s in states for h in s.handles.values()):
        steps += 1
        assert steps < 300_000, f"hangs: {todo}"
        rank = source.randrange(size)
        state = states[rank]
        if may_submit(rank) and source.random() < 0.3:
            epoch, item = todo[rank].pop(0)
            if item is None:
                state.handles[epoch, "join"] = state.engine.submit(
                    GLOBAL_SET, Request(Kind.JOIN), JOIN_KEY, [], []
                )
            else:
                index, op = item
                submit(state, rank, size, index, op, epoch, set_ids[op.set_ranks])
        else:
            state.engine.step()
            assert not state.engine.failed, state.engine._failure
        clock.now += 0.0002
    for (epoch, index), who in submitted.items():
        op = ops[index]
        results = expected(op, index, epoch, size, who)
        for rank in who:
            handle = states[rank].handles[epoch, index]
            if results[rank] is MismatchError:
                with pytest.raises(MismatchError):
                    handle.wait()
            else:
                (got,) = handle.wait()[:1]
                np.testing.assert_allclose(got, results[rank], rtol=1e-12)
                assert got.shape == results[rank].shape
    answers = {
        epoch: {s.handles[epoch, "join"].wait() for s in states}
        for epoch, stop in enumerate(stops)
        if stop is not None
    }
    assert all(len(ranks) == 1 for ranks in answers.values()), answers
    close(states, source, clock)
    world.check_quiet()


def close(states, source, clock):
    for state in states:
        state.engine._closing = "the test is over"
    steps = 0
    while not all(state.engine._closed() for state in states):
        states[source.randrange(len(states))].engine.step()
        clock.now += 0.0002
        steps += 1
        assert steps < 100_000, "shutdown hangs"


@settings(
    max_examples=2500,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    script=scripts(),
    capacity=st.sampled_from([0, 1, 2, 1024]),
    threshold=st.sampled_from([0, 1, 64, 1 << 20]),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_schedule_ends_as_the_sequential_model_says(script, capacity, threshold, seed):
    run_script(*script, capacity, threshold, seed)
