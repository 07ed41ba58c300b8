"""Process sets: isolated from each other, ranks relative, free to overlap, come and go."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from .expected import assert_equal, known, reduced


def test_global_set(hvd, world):
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0
    assert everyone.size() == world.size
    assert everyone.rank() == world.rank
    assert everyone.included()
    assert list(everyone.ranks) == list(world.ranks)


@pytest.mark.np(2, 4)
def test_two_halves_at_once(hvd, world):
    half = world.size // 2
    sets = [hvd.add_process_set(range(half)), hvd.add_process_set(range(half, world.size))]
    assert len({0, *(one.process_set_id for one in sets)}) == 3
    mine = sets[world.rank // half]
    other = sets[1 - world.rank // half]
    members = list(mine.ranks)
    assert members == [rank for rank in world.ranks if rank // half == world.rank // half]
    assert (mine.size(), mine.rank(), mine.included()) == (half, world.rank % half, True)
    assert not other.included()
    # A different number of steps in each half: nobody waits for the other half.
    for step in range(5 + 10 * (world.rank // half)):
        inputs = {rank: known(rank, 50, seed=step) for rank in members}
        result = hvd.allreduce(inputs[world.rank], name="grad", op=hvd.Average, process_set=mine)
        assert_equal(result, reduced(list(inputs.values()), "Average"))
    with pytest.raises(ValueError):
        hvd.allreduce(np.ones(2), process_set=other)
    assert_equal(hvd.allreduce(np.ones(2), op=hvd.Sum), np.full(2, float(world.size)))
    for one in sets:
        assert hvd.remove_process_set(one)


@pytest.mark.np(3, 4)
def test_every_collective_in_a_set(hvd, world):
    members = [0, 2]
    group = hvd.add_process_set(hvd.ProcessSet(members))
    if world.rank in members:
        place = members.index(world.rank)
        inputs = [known(rank, (4, 2)) for rank in members]
        mine = inputs[place]
        options = {"process_set": group}
        assert_equal(
            hvd.allgather(mine[: place + 1], **options),
            np.concatenate([inputs[0][:1], inputs[1][:2]]),
        )
        # The root is named by its global rank, as in Horovod.
        assert_equal(hvd.broadcast(mine, 2, **options), inputs[1])
        with pytest.raises(ValueError):
            hvd.broadcast(mine, 1, **options)
        wanted = np.concatenate([array[2 * place :][:2] for array in inputs])
        assert_equal(hvd.alltoall(mine, **options), wanted)
        output, counts = hvd.alltoall(mine, splits=[1, 3], **options)
        cut = slice(0, 1) if place == 0 else slice(1, 4)
        assert_equal(output, np.concatenate([array[cut] for array in inputs]))
        assert list(counts) == [(1, 3)[place]] * 2
        total = reduced([array[:3] for array in inputs], "Sum")
        result = hvd.reducescatter(mine[:3], op=hvd.Sum, **options)
        assert_equal(result, total[:2] if place == 0 else total[2:])
        hvd.barrier(process_set=group)
        assert hvd.broadcast_object({"from": world.rank}, 2, process_set=group) == {"from": 2}
        assert hvd.allgather_object(world.rank, process_set=group) == members
        first, second = hvd.grouped_allreduce([mine, mine[0]], op=hvd.Max, **options)
        assert_equal(first, reduced(inputs, "Max"))
        assert_equal(second, reduced([array[0] for array in inputs], "Max"))
    hvd.remove_process_set(group)


@pytest.mark.np(3, 4)
def test_overlapping_sets_in_a_circle_do_not_deadlock(hvd, world):
    pairs = [(rank, (rank + 1) % world.size) for rank in world.ranks]
    sets = [hvd.add_process_set(sorted(pair)) for pair in pairs]
    for step in range(10):
        # Every rank begins with its own pair, so that all of them wait in a circle.
        mine = (world.rank, (world.rank - 1) % world.size)
        handles = [
            hvd.allreduce_async(
                np.full(20_000, step + world.rank, np.float64),
                name="circle",
                op=hvd.Sum,
                process_set=sets[index],
            )
            for index in mine
        ]
        for index, handle in zip(mine, handles, strict=True):
            wanted = np.full(20_000, 2.0 * step + sum(pairs[index]))
            assert_equal(hvd.synchronize(handle), wanted)
    for one in sets:
        hvd.remove_process_set(one)


@pytest.mark.np(3, 4)
def test_blocking_calls_in_overlapping_sets(hvd, world):
    first, second = hvd.add_process_set([0, 1]), hvd.add_process_set([1, 2])
    for step in range(5):
        if world.rank in (0, 1):
            result = hvd.allreduce(
                np.full(3, world.rank + step, np.int64), op=hvd.Sum, process_set=first
            )
            assert_equal(result, np.full(3, 1 + 2 * step, np.int64))
        if world.rank in (1, 2):
            result = hvd.allreduce(
                np.full(3, world.rank + step, np.int64), op=hvd.Sum, process_set=second
            )
            assert_equal(result, np.full(3, 3 + 2 * step, np.int64))
    hvd.remove_process_set(first)
    hvd.remove_process_set(second)


def test_set_of_one(hvd, world):
    sets = [hvd.add_process_set([rank]) for rank in world.ranks] if world.size > 1 else []
    for one in sets:
        assert one.included() == (list(one.ranks) == [world.rank])
        if one.included():
            assert_equal(
                hvd.allreduce(np.full(3, 7.0), op=hvd.Sum, process_set=one), np.full(3, 7.0)
            )
    for one in sets:
        hvd.remove_process_set(one)


@pytest.mark.np(2, 3)
def test_added_and_removed_again(hvd, world):
    identities = []
    for _ in range(4):
        group = hvd.add_process_set(list(world.ranks)[:-1])
        identities.append(group.process_set_id)
        if group.included():
            result = hvd.allreduce(np.ones(3), name="again", op=hvd.Sum, process_set=group)
            assert_equal(result, np.full(3, float(group.size())))
        assert hvd.remove_process_set(group)
        with pytest.raises(ValueError):
            hvd.allreduce(np.ones(3), process_set=group)
    assert all(identity is not None and identity > 0 for identity in identities)
    assert_equal(hvd.allreduce(np.ones(3), op=hvd.Sum), np.full(3, float(world.size)))


@pytest.mark.np(2, 3)
def test_threads_that_add_or_remove_one_set_at_once(hvd, world):
    def at_once(function):
        """Call it in three threads at once; return what they return or raise."""
        results = []
        start = threading.Barrier(3)

        def work():
            start.wait(20)
            try:
                results.append(function())
            except Exception as error:
                results.append(error)

        threads = [threading.Thread(target=work, daemon=True) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert not any(thread.is_alive() for thread in threads), "a thread waits for ever"
        return results

    for _ in range(10):
        added = at_once(lambda: hvd.add_process_set(list(world.ranks)[:-1]))
        (group,) = [one for one in added if isinstance(one, hvd.ProcessSet)]
        refused = [error for error in added if error is not group]
        assert [type(error) for error in refused] == [ValueError] * 2
        assert all("is registered already" in str(e) or "another thread" in str(e) for e in refused)
        removed = at_once(lambda group=group: hvd.remove_process_set(group))
        assert sorted(removed, key=str) == [False, False, True]
        assert not hvd.remove_process_set(group)
        assert_equal(hvd.allreduce(np.ones(3), op=hvd.Sum), np.full(3, float(world.size)))


@pytest.mark.np(2, 3)
def test_the_global_set_stays(hvd, world):
    try:
        removed = hvd.remove_process_set(hvd.global_process_set)
    except ValueError:
        removed = False
    assert not removed
    assert_equal(hvd.allreduce(np.ones(3), op=hvd.Sum), np.full(3, float(world.size)))


@pytest.mark.np(2, 3)
def test_set_that_no_rank_has_heard_of(hvd, world):
    with pytest.raises(ValueError):
        hvd.allreduce(np.ones(3), process_set=hvd.ProcessSet([0]))
    for ranks in ([world.size], [-1], [0, 0]):
        with pytest.raises(ValueError):
            hvd.add_process_set(ranks)
    assert_equal(hvd.allreduce(np.ones(3), op=hvd.Sum), np.full(3, float(world.size)))


@pytest.mark.np(3)
def test_same_name_in_two_sets_at_once(hvd, world):
    group = hvd.add_process_set([0, 1])
    if world.rank < 2:
        small = hvd.allreduce_async(np.ones(3), name="x", op=hvd.Sum, process_set=group)
    large = hvd.allreduce_async(np.ones(5), name="x", op=hvd.Sum)
    assert_equal(hvd.synchronize(large), np.full(5, float(world.size)))
    if world.rank < 2:
        assert_equal(hvd.synchronize(small), np.full(3, 2.0))
    hvd.remove_process_set(group)


@pytest.mark.np(4)
def test_mismatch_in_one_half_leaves_the_other_alone(hvd, world):
    sets = [hvd.add_process_set([0, 1]), hvd.add_process_set([2, 3])]
    mine = sets[world.rank // 2]
    for step in range(5):
        if world.rank < 2:
            with pytest.raises(hvd.MismatchError, match="^Mismatched "):
                hvd.allreduce(np.ones(3 + world.rank), name=f"s{step}", process_set=mine)
        else:
            result = hvd.allreduce(np.ones(3), name=f"s{step}", op=hvd.Sum, process_set=mine)
            assert_equal(result, np.full(3, 2.0))
    for one in sets:
        hvd.remove_process_set(one)


@pytest.mark.np(3, 4)
def test_mismatched_roots_are_named_as_the_caller_knows_them(hvd, world):
    group = hvd.add_process_set([0, 2])
    if group.included():
        with pytest.raises(hvd.MismatchError, match=r"0 on rank 0\b.*2 on rank 2\b"):
            hvd.broadcast(np.ones(2), world.rank, name="root", process_set=group)
    hvd.remove_process_set(group)


def test_what_is_no_process_set_is_refused_by_name(hvd):
    for wrong in (None, 0, [0]):
        with pytest.raises(TypeError, match="process_set must be a ProcessSet"):
            hvd.allreduce(np.ones(2), process_set=wrong)
    with pytest.raises(TypeError, match="takes a ProcessSet, not None"):
        hvd.remove_process_set(None)
    assert hvd.allreduce(np.ones(1), op=hvd.Sum)[0] == hvd.size()
