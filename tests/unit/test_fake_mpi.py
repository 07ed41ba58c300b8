"""The fake must catch what it is there to catch, or the tests that use it prove nothing."""

from __future__ import annotations

import os
import random
import sys
import threading

import numpy as np
import pytest

from hvdlite.transport.types import DType, ReduceOp

from .fake_mpi import (
    FakeWorld,
    MPIMisuse,
    Stuck,
    drive,
    prompt,
    random_scheduler,
    scripted_scheduler,
)


def eager(event):
    return True


def late(event):
    """Complete at once, but read what is sent only when it is received."""
    return event != "eager"


def wait(request, tests=100):
    for _ in range(tests):
        if request.Test():
            return
    raise AssertionError("not complete")


def numbers(*values):
    return np.array(values, dtype=np.int64)


@pytest.mark.parametrize("seed", range(20))
def test_messages_do_not_overtake_within_a_channel(seed):
    world = FakeWorld(2, random_scheduler(seed))
    first, second = world.communicators
    sent = [[numbers(10 * tag + i) for i in range(5)] for tag in (0, 1)]
    sends = [first.isend(sent[tag][i], 1, tag) for i in range(5) for tag in (0, 1)]
    received = [[numbers(-1) for _ in range(5)] for tag in (0, 1)]
    receives = [second.irecv(received[tag][i], 0, tag) for tag in (1, 0) for i in range(5)]
    pending = sends + receives
    random.Random(seed).shuffle(pending)
    for request in pending:
        wait(request)
    assert received == sent
    world.check_quiet()


def test_later_messages_may_complete_first():
    answers = iter([True, True, False, True])  # two sends; then two Tests
    world = FakeWorld(2, lambda event: next(answers))
    first, second = world.communicators
    for value in (1, 2):
        first.isend(numbers(value), 1, 0)
    targets = [numbers(0), numbers(0)]
    receives = [second.irecv(target, 0, 0) for target in targets]
    assert not receives[0].Test()
    assert receives[1].Test()
    assert targets[1] == 2


def test_delays_are_finite():
    world = FakeWorld(1, lambda event: False, patience=3)
    barrier = world.communicators[0].ibarrier()
    assert [barrier.Test() for _ in range(5)] == [False, False, False, True, True]


def test_probes_are_delayed_too():
    world = FakeWorld(2, lambda event: False, patience=2)
    first, second = world.communicators
    first.isend(numbers(1), 1, 0)
    assert [second.probe(0, 0) for _ in range(4)] == [None, None, 8, 8]


def test_scripts_repeat():
    schedule = scripted_scheduler([True, False, False])
    assert [schedule("complete") for _ in range(6)] == [True, False, False] * 2
    assert scripted_scheduler([])("complete")


def test_late_messages_are_read_late():
    world = FakeWorld(2, late)
    first, second = world.communicators
    data, target = numbers(1), numbers(0)
    send = first.isend(data, 1, 0)
    assert not send.Test()
    data[0] = 2
    wait(second.irecv(target, 0, 0))
    assert target == 2
    with pytest.raises(MPIMisuse, match="buffer changed"):
        send.Test()


def test_changing_an_eager_send_is_caught_too():
    world = FakeWorld(2, eager)
    data = numbers(1)
    send = world.communicators[0].isend(data, 1, 0)
    data[0] = 2
    with pytest.raises(MPIMisuse, match="buffer changed"):
        send.Test()


def test_buffers_of_pending_receives_hold_garbage():
    world = FakeWorld(2)
    target = numbers(7, 8)
    receive = world.communicators[1].irecv(target, 0, 0)
    assert 7 not in target and 8 not in target
    assert not receive.Test()
    world.communicators[0].isend(numbers(1), 1, 0)
    assert world.communicators[1].probe(0, 0) is None  # the receive has it
    assert receive.Test()
    assert target.tolist() == [1, 8]  # a shorter message leaves the rest alone


def test_writing_to_a_pending_receive_is_caught():
    world = FakeWorld(2)
    target = numbers(7)
    receive = world.communicators[1].irecv(target, 0, 0)
    target[0] = 3
    world.communicators[0].isend(numbers(1), 1, 0)
    with pytest.raises(MPIMisuse, match="wrote"):
        receive.Test()


def test_truncation_is_caught():
    world = FakeWorld(2)
    world.communicators[0].isend(numbers(1, 2), 1, 0)
    with pytest.raises(MPIMisuse, match="truncated"):
        world.communicators[1].irecv(numbers(0), 0, 0).Test()


def test_probe():
    world = FakeWorld(2)
    first, second = world.communicators
    assert second.probe(0, 3) is None
    first.isend(numbers(1, 2), 1, 3)
    first.isend(numbers(1), 1, 3)
    assert second.probe(0, 3) == 16
    wait(second.irecv(numbers(0, 0), 0, 3))
    assert second.probe(0, 3) == 8
    with pytest.raises(MPIMisuse, match=r"1 messages from 0 to 1, tag 3.*sent"):
        world.check_quiet()


@pytest.mark.parametrize(
    "array",
    [np.zeros((4, 4))[:, 1], np.asfortranarray(np.zeros((2, 3))), [1, 2]],
    ids=["strided", "fortran", "list"],
)
def test_only_contiguous_arrays(array):
    with pytest.raises(MPIMisuse, match="contiguous"):
        FakeWorld(2).communicators[0].isend(array, 1, 0)


@pytest.mark.parametrize("scheduler", [prompt, late, random_scheduler(1)])
def test_collectives(scheduler):
    world = FakeWorld(3, scheduler)
    words = [np.array([0b111 ^ (1 << r)], dtype=np.uint64) for r in range(3)]
    sums = [np.array([r, 1.5], dtype=np.float32) for r in range(3)]
    flags = [np.array([r == 1, False]) for r in range(3)]
    gathered = [np.zeros(6, np.int16) for _ in range(3)]
    shared = [numbers(r) for r in range(3)]
    requests = []
    for rank, comm in enumerate(world.communicators):
        requests += [
            comm.iband(words[rank]),
            comm.iallreduce(sums[rank], DType.FLOAT32, ReduceOp.SUM),
            comm.iallreduce(flags[rank], DType.BOOL, ReduceOp.SUM),
            comm.iallgather(np.array([rank, -rank], np.int16), gathered[rank]),
            comm.ibcast(shared[rank], 1),
            comm.ibarrier(),
        ]
        if rank < 2:
            assert not requests[-1].Test()
            assert not requests[0].Test()
    for request in requests:
        wait(request)
    for rank in range(3):
        assert words[rank].tolist() == [0]
        assert sums[rank].tolist() == [3, 4.5]
        assert flags[rank].tolist() == [True, False]
        assert gathered[rank].tolist() == [0, 0, 1, -1, 2, -2]
        assert shared[rank].tolist() == [1]
    world.check_quiet()


def test_different_collectives_are_caught():
    world = FakeWorld(2)
    world.communicators[0].ibarrier()
    with pytest.raises(MPIMisuse, match=r"number 0 .*\('ibcast', 8, 0\).*\('ibarrier',\).*\[0\]"):
        world.communicators[1].ibcast(numbers(1), 0)


def test_different_sizes_are_caught():
    world = FakeWorld(2)
    world.communicators[0].ibcast(numbers(1), 0)
    with pytest.raises(MPIMisuse, match="collective number 0"):
        world.communicators[1].ibcast(numbers(1, 2), 0)


def test_unmatched_collectives_are_caught():
    world = FakeWorld(2)
    world.communicators[0].ibarrier()
    with pytest.raises(MPIMisuse, match="collective calls"):
        world.check_quiet()


def test_gathering_into_the_send_buffer_is_caught():
    world = FakeWorld(1)
    data = numbers(1)
    with pytest.raises(MPIMisuse, match="iallgather"):
        world.communicators[0].iallgather(data, data).Test()


def test_reduces_nothing_that_mpi_does_not():
    comm = FakeWorld(1).communicators[0]
    assert not comm.reduces(DType.FLOAT16, ReduceOp.SUM)
    assert not comm.reduces(DType.FLOAT32, ReduceOp.MIN)
    with pytest.raises(MPIMisuse, match="bfloat16"):
        comm.iallreduce(np.zeros(1, np.uint16), DType.BFLOAT16, ReduceOp.SUM)


def test_groups_have_traffic_of_their_own():
    world = FakeWorld(3)
    children = [comm.duplicate() for comm in world.communicators]
    pairs = [comm.subset([2, 0]) for comm in children]
    assert pairs[1] is None
    assert [pairs[0].rank, pairs[2].rank] == [1, 0]
    assert pairs[0].size == 2
    pairs[2].isend(numbers(5), 1, 0)
    assert children[0].probe(2, 0) is None
    assert world.communicators[0].probe(2, 0) is None
    target = numbers(0)
    wait(pairs[0].irecv(target, 0, 0))
    assert target == 5
    pairs[0].free()
    with pytest.raises(MPIMisuse, match="freed"):
        pairs[0].ibarrier()
    pairs[2].ibarrier()
    with pytest.raises(ValueError, match="distinct"):
        children[0].subset([0, 0])


def test_different_groups_are_caught():
    world = FakeWorld(2)
    world.communicators[0].subset([0])
    with pytest.raises(MPIMisuse, match="subset"):
        world.communicators[1].subset([0, 1])


def test_a_dropped_rank_does_nothing_any_more():
    world = FakeWorld(2, late)
    first, second = world.communicators
    first.isend(numbers(1), 1, 0)
    barrier = first.ibarrier()
    target = numbers(0)
    receive = second.irecv(target, 0, 0)
    world.drop(0)
    wait(second.ibarrier())  # rank 0 had come that far
    assert not barrier.Test()
    assert not receive.Test()  # its message had not left
    with pytest.raises(MPIMisuse, match="dropped"):
        first.ibarrier()


def test_drive_returns_results_and_sees_standstill():
    world = FakeWorld(2, random_scheduler(4))

    def barrier(comm, result):
        yield comm.ibarrier()
        return result

    started = [[barrier(comm, f"{comm.rank}{i}") for i in range(3)] for comm in world.communicators]
    assert drive(world, started, random.Random(0)) == [["00", "01", "02"], ["10", "11", "12"]]
    with pytest.raises(Stuck, match="rank 0 waits"):
        drive(world, [[barrier(world.communicators[0], 0)], []])


def test_collectives_of_ranks_that_are_threads():
    world = FakeWorld(4)
    sums = [[], [], [], []]

    def work(comm):
        for _ in range(100):
            (pair,) = filter(None, [comm.subset([0, 1]), comm.subset([2, 3])])
            mine, all_of_them = np.array([comm.rank]), np.empty(pair.size, np.int64)
            request = pair.iallgather(mine, all_of_them)
            while not request.Test():
                os.sched_yield()
            sums[comm.rank].append(int(all_of_them.sum()))

    threads = [
        threading.Thread(target=work, args=(comm,), daemon=True) for comm in world.communicators
    ]
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
    finally:
        sys.setswitchinterval(before)
    assert sums == [[1] * 100, [1] * 100, [5] * 100, [5] * 100]
