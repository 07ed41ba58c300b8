"""Parameters that change in the middle of a job: all ranks do the same before, at and after it.

Ranks on an in-memory communicator that delays what MPI may delay. It refuses collectives that
differ between ranks in order or size, which is what a change at different points leads to.
"""

from __future__ import annotations

import random

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hvdlite.autotune import Parameters
from hvdlite.engine.engine import GLOBAL_SET, Engine
from hvdlite.engine.negotiation import JOIN_KEY
from hvdlite.engine.requests import Kind, Request
from hvdlite.settings import Settings
from hvdlite.transport.auto import make_transport
from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import FakeWorld, random_scheduler

THRESHOLDS = (0, 1, 64, 200, 1 << 20)
CAPACITIES = (0, 1, 3, 1024)
START = Parameters(64, 0.001, 3, "auto")

parameters = st.builds(
    Parameters,
    st.sampled_from(THRESHOLDS),
    st.sampled_from((0.0, 1e-4, 1e-2)),
    st.sampled_from(CAPACITIES),
    st.sampled_from(("auto", "mpi", "ring")),
)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Job:
    """Some ranks with their engines, of which one at random takes the next step."""

    def __init__(self, size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.world = FakeWorld(size, random_scheduler(seed))
        self.clock = Clock()
        data = [comm.duplicate() for comm in self.world.communicators]
        self.engines = [
            Engine(
                self.world.communicators[rank],
                data[rank],
                # MPI's collectives for some batches and a ring for others, with auto.
                lambda comm, ranks: make_transport(comm, Settings(small_bytes=64)),
                START,
                clock=self.clock,
            )
            for rank in range(size)
        ]
        self.steps = 0

    def step(self) -> None:
        self.steps += 1
        assert self.steps < 20_000, "hangs"
        engine = self.random.choice(self.engines)
        engine.step()
        assert not engine.failed, engine._failure
        self.clock.now += 0.0002

    def finish(self) -> None:
        for engine in self.engines:
            engine._closing = "the test is over"
        while not all(engine._closed() for engine in self.engines):
            self.step()
        self.world.check_quiet()

    def parameters(self, set_id: int = GLOBAL_SET) -> set[Parameters]:
        return {e.channels[set_id].parameters for e in self.engines if set_id in e.channels}


def value(rank: int, step: int, index: int, elements: int) -> np.ndarray:
    return np.arange(elements, dtype=np.float32) % 7 * (rank + 1) + step + 3 * index


@settings(
    max_examples=400,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow],
)
@given(
    size=st.integers(2, 4),
    tensors=st.lists(st.tuples(st.integers(0, 40), st.booleans()), min_size=1, max_size=7),
    steps=st.integers(1, 4),
    changes=st.lists(st.tuples(parameters, st.booleans()), max_size=6),
    joiner=st.none() | st.integers(0, 3),
    seed=st.integers(0, 2**32 - 1),
)
def test_changes_at_any_time_leave_results_right_and_ranks_agreed(
    size, tensors, steps, changes, joiner, seed
):
    job = Job(size, seed)
    left = list(changes)
    handles: list[dict[tuple[int, int], object]] = [{} for _ in range(size)]
    todo = []
    for rank in range(size):
        order = []
        for step in range(steps if rank != joiner else steps - 1):
            named = [i for i, (_, has_name) in enumerate(tensors) if has_name]
            job.random.shuffle(named)
            unnamed = iter([i for i, (_, has_name) in enumerate(tensors) if not has_name])
            places = [True] * len(named) + [False] * (len(tensors) - len(named))
            job.random.shuffle(places)
            names = iter(named)
            order += [(step, next(names) if is_named else next(unnamed)) for is_named in places]
        todo.append([*order, None] if joiner is not None else order)

    def submit(rank: int) -> None:
        item = todo[rank][0]
        # A name may be used again once its last use is over.
        if item is not None and any(
            not handle.done() for (step, _), handle in handles[rank].items() if step < item[0]
        ):
            return
        todo[rank].pop(0)
        if item is None:
            handles[rank][steps, 0] = job.engines[rank].submit(
                GLOBAL_SET, Request(Kind.JOIN), JOIN_KEY, [], []
            )
            return
        step, index = item
        elements, has_name = tensors[index]
        data = value(rank, step, index, elements)
        request = Request(Kind.ALLREDUCE, (DType.FLOAT32,), (data.shape,), ReduceOp.SUM)
        name = f"t{index}" if has_name else None
        out = np.empty_like(data)
        handles[rank][item] = job.engines[rank].submit(GLOBAL_SET, request, name, [data], [out])

    while any(todo) or not all(h.done() for of_rank in handles for h in of_rank.values()):
        rank = job.random.randrange(size)
        if todo[rank] and job.random.random() < 0.3:
            submit(rank)
        elif left and job.random.random() < 0.05:
            job.engines[0].retune(*left.pop(0))
        job.step()
    for step in range(steps):
        for index, (elements, _) in enumerate(tensors):
            there = [r for r in range(size) if step < steps - (r == joiner)]
            expected = sum(value(r, step, index, elements) for r in there)
            for rank in there:
                (got,) = handles[rank][step, index].wait()
                # Small whole numbers: sums are exact in whatever order they are taken.
                assert got.tobytes() == np.asarray(expected, np.float32).tobytes()
    job.finish()
    assert len(job.parameters()) == 1
    caches = [engine.channels[GLOBAL_SET].negotiator.cache for engine in job.engines]
    assert len({(cache.capacity, cache.slots, len(cache)) for cache in caches}) == 1


def run_steps(job: Job, set_id: int, ranks: tuple[int, ...], steps: int) -> None:
    for _ in range(steps):
        handles = []
        for rank in ranks:
            data = np.ones(4, np.float32)
            request = Request(Kind.ALLREDUCE, (DType.FLOAT32,), (data.shape,), ReduceOp.SUM)
            engine = job.engines[rank]
            handles.append(engine.submit(set_id, request, "w", [data], [np.empty_like(data)]))
        while not all(handle.done() for handle in handles):
            job.step()


def test_a_change_waits_for_traffic_and_starts_no_round_of_its_own():
    job = Job(3, 1)
    changed = Parameters(200, 0.01, 0, "ring")
    job.engines[0].retune(changed, False)
    for _ in range(500):
        job.step()
    assert [engine.counters.rounds for engine in job.engines] == [0, 0, 0]
    assert all(engine.channels[GLOBAL_SET].quiet for engine in job.engines)
    assert job.parameters() == {START}
    run_steps(job, GLOBAL_SET, (0, 1, 2), 1)
    assert job.parameters() == {changed}
    job.finish()


def test_a_change_does_not_keep_a_job_from_ending():
    job = Job(2, 2)
    job.engines[0].retune(Parameters(200, 0.01, 0, "ring"), True)
    job.finish()
    assert len(job.parameters()) == 1


def test_other_process_sets_get_the_final_values_only():
    job = Job(3, 3)
    ranks = (1, 2)
    (set_id,) = {engine.add_process_set(ranks) for engine in job.engines}
    tried, final = START._replace(fusion_threshold=1), START._replace(fusion_threshold=200)
    job.engines[0].retune(tried, False)
    run_steps(job, GLOBAL_SET, (0, 1, 2), 2)
    run_steps(job, set_id, ranks, 2)
    assert job.parameters() == {tried}
    assert job.parameters(set_id) == {START}
    job.engines[0].retune(final, True)
    run_steps(job, GLOBAL_SET, (0, 1, 2), 2)
    run_steps(job, set_id, ranks, 2)
    assert job.parameters() == job.parameters(set_id) == {final}
    (later,) = {engine.sets.split((0, 2)) for engine in job.engines}
    assert job.parameters(later) == {final}
    job.finish()


def test_a_change_leaves_what_is_in_flight_alone():
    job = Job(2, 4)
    channel = job.engines[0].channels[GLOBAL_SET]
    buffer = channel._buffers.acquire(1000)
    before = buffer.ctypes.data, len(buffer)
    channel.retune(START._replace(fusion_threshold=10))
    channel.trim_buffers()
    larger = channel._buffers.acquire(5000)
    assert (buffer.ctypes.data, len(buffer)) == before
    assert not np.shares_memory(buffer, larger)
    channel._buffers.release(buffer)
    channel._buffers.release(larger)
    channel.trim_buffers()
    assert [len(free) for free in channel._buffers._free] == [0, 0]
