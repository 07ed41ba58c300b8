"""Beginning, ending and beginning again; who and where we are (B30 to B33, B35)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hvdlite.transport.mpi_communicator import MPICommunicator

from .expected import assert_equal
from .jobs import run_job, run_python


@pytest.fixture
def restarted(hvd, monkeypatch):
    """Start again with other arguments or variables, and put things back afterwards."""

    def restart(*args, env=None, **kwargs):
        hvd.shutdown()
        for name, value in (env or {}).items():
            monkeypatch.setenv(name, value)
        hvd.init(*args, **kwargs)

    yield restart
    monkeypatch.undo()
    hvd.shutdown()
    hvd.init()


def _works(hvd, world):
    result = hvd.allreduce(np.full(5, world.rank, np.int64), op=hvd.Sum, name="works")
    assert_equal(result, np.full(5, sum(world.ranks), np.int64))


def test_rank_and_size(hvd, world):
    assert (hvd.rank(), hvd.size()) == (world.rank, world.size)
    assert (hvd.local_rank(), hvd.local_size()) == (world.rank, world.size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    assert hvd.is_initialized()


def test_init_and_shutdown_three_times(hvd, world, comm):
    for _ in range(3):
        hvd.shutdown()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match="has not been initialized"):
            hvd.rank()
        with pytest.raises(hvd.NotInitializedError):
            hvd.allreduce(np.ones(2))
        assert comm.allreduce(1) == world.size
        hvd.init()
        _works(hvd, world)


def test_doing_it_twice_changes_nothing(hvd, world):
    hvd.init()
    _works(hvd, world)
    hvd.shutdown()
    hvd.shutdown()
    hvd.init()
    hvd.init()
    _works(hvd, world)


@pytest.mark.np(1, 2, 3)
def test_users_own_traffic_on_comm_world(hvd, world):
    from mpi4py import MPI

    user = MPI.COMM_WORLD
    left, right = (world.rank - 1) % world.size, (world.rank + 1) % world.size
    for step in range(20):
        # A wildcard receive that is open all along must not catch anything of ours.
        buffer = np.zeros(1)
        request = user.Irecv(buffer, source=MPI.ANY_SOURCE, tag=MPI.ANY_TAG)
        handle = hvd.allreduce_async(np.full(1000, step, np.int64), name="mixed", op=hvd.Sum)
        assert user.allreduce(world.rank) == sum(world.ranks)
        assert_equal(hvd.synchronize(handle), np.full(1000, step * world.size, np.int64))
        _works(hvd, world)
        user.Send(np.full(1, 100.0 * step + world.rank), dest=right, tag=step)
        request.Wait()
        assert buffer[0] == 100 * step + left


@pytest.mark.np(4)
def test_init_with_lists_of_ranks(restarted, hvd, world):
    members = [0, 2] if world.rank % 2 == 0 else [3, 1]
    restarted(comm=members)
    assert (hvd.rank(), hvd.size()) == (members.index(world.rank), 2)
    for step in range(3 + 4 * (world.rank % 2)):
        result = hvd.allreduce(np.full(3, world.rank + step, np.int64), name="half", op=hvd.Sum)
        assert_equal(result, np.full(3, sum(members) + 2 * step, np.int64))
    assert_equal(hvd.broadcast(np.full(2, world.rank), 0), np.full(2, members[0]))


@pytest.mark.np(3, 4)
def test_ranks_outside_the_list_do_nothing(hvd, world, comm):
    hvd.shutdown()
    members = list(world.ranks)[:-1]
    if world.rank in members:
        hvd.init(comm=members)
        assert hvd.size() == world.size - 1
        result = hvd.allreduce(np.ones(3), op=hvd.Sum)
        assert_equal(result, np.full(3, world.size - 1.0))
        hvd.shutdown()
    comm.barrier()
    hvd.init()
    _works(hvd, world)


@pytest.mark.np(2, 3, 4)
def test_init_with_a_communicator(restarted, hvd, world):
    from mpi4py import MPI

    mine = MPI.COMM_WORLD.Split(world.rank % 2, key=-world.rank)
    restarted(comm=mine)
    assert (hvd.rank(), hvd.size()) == (mine.rank, mine.size)
    members = [rank for rank in world.ranks if rank % 2 == world.rank % 2]
    result = hvd.allreduce(np.full(3, world.rank, np.int64), op=hvd.Sum)
    assert_equal(result, np.full(3, sum(members), np.int64))
    assert mine.allreduce(1) == mine.size  # still the user's own


@pytest.mark.np(3, 4)
def test_init_with_process_sets(restarted, hvd, world):
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1, 2])]
    restarted(process_sets=sets)
    assert len({0, *(one.process_set_id for one in sets)}) == 3
    assert sets[0].included() == (world.rank == 0)
    if world.rank in (1, 2):
        result = hvd.allreduce(np.full(3, world.rank), op=hvd.Sum, process_set=sets[1])
        assert_equal(result, np.full(3, 3))
    _works(hvd, world)


@pytest.mark.np(1, 2, 3)
def test_an_init_that_fails_leaves_nothing_behind(restarted, hvd, world, monkeypatch):
    made = []
    create = MPICommunicator.__init__

    def counted(self, *args, **kwargs):
        create(self, *args, **kwargs)
        made.append(self)

    monkeypatch.setattr(MPICommunicator, "__init__", counted)
    good = hvd.ProcessSet([0])
    bad = {
        "the ranks of this job are 0 to": hvd.ProcessSet([world.size]),
        "is registered already": list(world.ranks),
        "takes a sequence of ranks": 5,
    }
    hvd.shutdown()
    for text, process_set in bad.items():
        with pytest.raises((ValueError, TypeError), match=text):
            hvd.init(process_sets=[good, process_set] if world.size > 1 else [process_set])
        assert not hvd.is_initialized()
        assert good.process_set_id is None
        assert hvd.global_process_set.ranks is None
    # Each time those of the job, of the set, and of their transports.
    assert len(made) >= 2 * len(bad)
    assert not [one for one in made if one._owned]
    monkeypatch.undo()
    restarted(process_sets=[good] if world.size > 1 else [])
    _works(hvd, world)


HOSTS = {
    "interleaved": ("abab", [0, 0, 1, 1], [2, 2, 2, 2], [0, 1, 0, 1], [2, 2, 2, 2], True),
    "in blocks": ("aabb", [0, 1, 0, 1], [2, 2, 2, 2], [0, 0, 1, 1], [2, 2, 2, 2], True),
    "uneven": ("aaab", [0, 1, 2, 0], [3, 3, 3, 1], [0, 0, 0, 1], [2, 1, 1, 2], False),
    "one each": ("abcd", [0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 2, 3], [4, 4, 4, 4], True),
    "apart and again": ("abba", [0, 0, 1, 1], [2, 2, 2, 2], None, [2, 2, 2, 2], True),
}


@pytest.mark.np(4)
@pytest.mark.parametrize("case", HOSTS)
def test_local_and_cross_ranks_follow_host_names(restarted, hvd, world, comm, case):
    names, local, local_sizes, cross, cross_sizes, homogeneous = HOSTS[case]
    restarted(env={"HVDLITE_HOSTNAME": f"node-{names[world.rank]}"})
    rank = world.rank
    assert (hvd.local_rank(), hvd.local_size()) == (local[rank], local_sizes[rank])
    assert hvd.cross_size() == cross_sizes[rank]
    if cross is not None:
        assert hvd.cross_rank() == cross[rank]
    assert hvd.is_homogeneous() == homogeneous
    # Whatever the order of hosts: places are unique, and one host is one cross rank.
    everyone = comm.allgather((hvd.local_rank(), hvd.cross_rank()))
    assert len(set(everyone)) == world.size
    _works(hvd, world)


@pytest.mark.np(2)
def test_horovods_spelling_of_the_host_name(restarted, hvd, world):
    restarted(env={"HOROVOD_HOSTNAME": f"node-{world.rank}"})
    assert (hvd.local_rank(), hvd.local_size()) == (0, 1)
    assert (hvd.cross_rank(), hvd.cross_size()) == (world.rank, 2)


@pytest.mark.np(1, 2)
def test_idle_engine_uses_no_processor(hvd, world, comm):
    _works(hvd, world)
    comm.barrier()
    began, used = time.monotonic(), time.process_time()
    time.sleep(3)
    used, seconds = time.process_time() - used, time.monotonic() - began
    comm.barrier()
    assert used < 0.02 * seconds, f"{used:.3f} s of {seconds:.1f} s"


@pytest.mark.np(2)
def test_waiting_for_a_late_rank_does_not_spin(hvd, world, comm):
    comm.barrier()
    if world.rank == 0:
        used = time.process_time()
        hvd.allreduce(np.ones(3), name="late")
        used = time.process_time() - used
        assert used < 0.3, f"{used:.3f} s of about 2 s"
    else:
        time.sleep(2)
        hvd.allreduce(np.ones(3), name="late")


def _threads():
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.np(1, 2)
def test_threads_come_and_go(hvd, world, comm):
    _works(hvd, world)
    hvd.shutdown()
    comm.barrier()
    python, system = threading.active_count(), _threads()
    for _ in range(3):
        hvd.init()
        _works(hvd, world)
        assert threading.active_count() <= python + 1
        assert _threads() <= system + 1
        hvd.shutdown()
        assert threading.active_count() == python
    hvd.init()


CALLS = """
import numpy as np
import hvdlite as hvd

group = hvd.ProcessSet([0])
x = np.ones(2)
calls = {
    "rank": hvd.rank,
    "size": hvd.size,
    "local_rank": hvd.local_rank,
    "local_size": hvd.local_size,
    "cross_rank": hvd.cross_rank,
    "cross_size": hvd.cross_size,
    "is_homogeneous": hvd.is_homogeneous,
    "allreduce": lambda: hvd.allreduce(x),
    "allreduce_async": lambda: hvd.allreduce_async(x),
    "allreduce_": lambda: hvd.allreduce_(x),
    "grouped_allreduce": lambda: hvd.grouped_allreduce([x]),
    "allgather": lambda: hvd.allgather(x),
    "grouped_allgather": lambda: hvd.grouped_allgather([x]),
    "broadcast": lambda: hvd.broadcast(x, 0),
    "broadcast_": lambda: hvd.broadcast_(x, 0),
    "alltoall": lambda: hvd.alltoall(x),
    "reducescatter": lambda: hvd.reducescatter(x),
    "grouped_reducescatter": lambda: hvd.grouped_reducescatter([x]),
    "barrier": hvd.barrier,
    "join": hvd.join,
    "broadcast_object": lambda: hvd.broadcast_object(1),
    "allgather_object": lambda: hvd.allgather_object(1),
    "add_process_set": lambda: hvd.add_process_set(group),
    "statistics": hvd.statistics,
}
"""


@pytest.mark.whole_job
def test_use_before_init():
    result = run_python(
        CALLS
        + """
from jobtools import say
said = {}
for name, call in calls.items():
    try:
        said[name] = repr(call())
    except ValueError as error:
        said[name] = [type(error).__name__, str(error)]
assert not hvd.is_initialized()
hvd.shutdown()
import sys
say(0, said=said, mpi="mpi4py.MPI" in sys.modules)
"""
    )
    assert result.returncode == 0, str(result)
    (values,) = result.said[0]
    for name, answer in values["said"].items():
        assert answer[0] == "NotInitializedError", (name, answer)
        assert "has not been initialized" in answer[1], name
        assert "init()" in answer[1], name
    assert not values["mpi"], "only init() may start MPI"


@pytest.mark.whole_job
def test_plain_python_is_a_world_of_one():
    result = run_python(
        """
        import numpy as np
        import hvdlite as hvd
        from jobtools import say

        hvd.init()
        x = np.arange(6.0).reshape(3, 2)
        for op in (hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product):
            assert (hvd.allreduce(x, op=op) == x).all()
            assert (hvd.reducescatter(x, op=op) == x).all()
        assert (hvd.allgather(x) == x).all()
        assert (hvd.broadcast(x, 0) == x).all()
        assert (hvd.alltoall(x) == x).all()
        output, counts = hvd.alltoall(x, splits=[3])
        assert (output == x).all() and list(counts) == [3]
        assert hvd.broadcast_object({"a": 1}) == {"a": 1}
        assert hvd.allgather_object(5) == [5]
        hvd.barrier()
        assert hvd.join() == 0
        say(0, where=[hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size(),
                      hvd.cross_rank(), hvd.cross_size(), hvd.is_homogeneous()])
        hvd.shutdown()
        """
    )
    assert result.returncode == 0, str(result)
    assert result.said[0][0]["where"] == [0, 1, 0, 1, 0, 1, True]
    assert "Traceback" not in result.stderr, str(result)


@pytest.mark.whole_job
@pytest.mark.parametrize("variable", ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE"))
def test_launcher_of_another_mpi(variable):
    result = run_python(
        """
        import hvdlite as hvd
        from jobtools import say

        try:
            hvd.init()
        except Exception as error:
            say(0, name=type(error).__name__, text=str(error))
            raise
        """,
        env={variable: "2"},
    )
    assert result.returncode not in (0, None), str(result)
    assert not result.timed_out, str(result)
    text = result.said[0][0]["text"]
    assert "2" in text and "mpirun" in text and "MPI" in text, text


@pytest.mark.whole_job
@pytest.mark.np(2)
def test_init_starts_mpi_where_the_user_asked_mpi4py_not_to(np_size):
    result = run_job(
        np_size,
        """
        import mpi4py
        mpi4py.rc.initialize = False
        import numpy as np
        import hvdlite as hvd
        from jobtools import say

        hvd.init()
        say(hvd.rank(), total=float(hvd.allreduce(np.ones(1), op=hvd.Sum)[0]))
        hvd.shutdown()
        """,
    )
    assert result.returncode == 0, str(result)
    assert result.said == {rank: [{"total": 2.0}] for rank in range(2)}, str(result)


# How a user may end MPI: before or after us, or before we have even begun.
FINALIZE = {
    "after shutdown": "hvd.init(); work(); hvd.shutdown(); MPI.Finalize()",
    "while we run": "hvd.init(); work(); MPI.COMM_WORLD.Barrier(); MPI.Finalize()",
    "while we run, then shutdown": "hvd.init(); work(); MPI.Finalize(); hvd.shutdown()",
}


@pytest.mark.whole_job
@pytest.mark.np(1, 2)
@pytest.mark.parametrize("case", FINALIZE)
def test_user_finalizes_mpi(np_size, case):
    result = run_job(
        np_size,
        f"""
import numpy as np
from mpi4py import MPI
import hvdlite as hvd
from jobtools import say

def work():
    total = hvd.allreduce(np.ones(3), op=hvd.Sum)
    assert (total == hvd.size()).all()

rank = MPI.COMM_WORLD.rank
{FINALIZE[case]}
say(rank, reached=True)
""",
        timeout=20,
    )
    assert not result.timed_out, str(result)
    assert result.returncode == 0, str(result)
    assert result.said == {rank: [{"reached": True}] for rank in range(np_size)}, str(result)
    assert "Traceback" not in result.stderr, str(result)


@pytest.mark.whole_job
def test_init_after_mpi_has_ended():
    result = run_python(
        """
        from mpi4py import MPI
        import hvdlite as hvd
        from jobtools import say

        MPI.Finalize()
        try:
            hvd.init()
        except hvd.HvdliteError as error:
            say(0, text=str(error))
        """
    )
    assert result.returncode == 0, str(result)
    assert "finalize" in result.said[0][0]["text"].lower(), str(result)


@pytest.mark.whole_job
@pytest.mark.np(1, 2, 3, 4)
def test_script_that_never_calls_shutdown(np_size):
    result = run_job(
        np_size,
        """
        import numpy as np
        import hvdlite as hvd
        from jobtools import say

        hvd.init()
        for step in range(3):
            total = hvd.allreduce(np.ones(10), name="grad", op=hvd.Sum)
        say(hvd.rank(), total=float(total[0]))
        """,
        timeout=20,
    )
    assert result.returncode == 0, str(result)
    assert result.said == {rank: [{"total": float(np_size)}] for rank in range(np_size)}, str(
        result
    )
    assert result.left_behind == 0, str(result)
    assert "Traceback" not in result.stderr, str(result)


@pytest.mark.whole_job
@pytest.mark.np(2)
def test_one_rank_may_take_its_time_at_the_end(np_size):
    result = run_job(
        np_size,
        """
        import time
        import numpy as np
        import hvdlite as hvd
        from jobtools import say

        hvd.init()
        hvd.allreduce(np.ones(10))
        if hvd.rank() == 0:
            time.sleep(2)  # writes a checkpoint, say, while the other one leaves
            say(0, finished=True)
        """,
        timeout=20,
    )
    assert result.returncode == 0, str(result)
    assert result.said == {0: [{"finished": True}]}, str(result)


@pytest.mark.whole_job
@pytest.mark.np(2)
def test_forked_helpers_do_no_harm(np_size):
    result = run_job(
        np_size,
        """
        import multiprocessing, sys
        import numpy as np
        import hvdlite as hvd
        from jobtools import say

        hvd.init()
        rank = hvd.rank()
        hvd.allreduce(np.ones(10), name="grad")
        fork = multiprocessing.get_context("fork")

        def use(queue):
            try:
                hvd.allreduce(np.ones(10), name="child")
            except hvd.HvdliteError as error:
                queue.put(str(error))

        queue = fork.Queue()
        helpers = [fork.Process(target=use, args=(queue,)),
                   fork.Process(target=sys.exit, args=(3,)),
                   fork.Process(target=divmod, args=(1, 0))]
        for helper in helpers:
            helper.start()
        text = queue.get(timeout=10)
        for step in range(20):
            total = hvd.allreduce(np.ones(10), name="grad", op=hvd.Sum)
        for helper in helpers:
            helper.join()
        with fork.Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
        total = hvd.allreduce(np.ones(10), name="grad", op=hvd.Sum)
        say(rank, total=float(total[0]), text=text, codes=[h.exitcode for h in helpers])
        """,
        timeout=25,
    )
    assert result.returncode == 0, str(result)
    for rank in range(np_size):
        (said,) = result.said[rank]
        assert said["total"] == 2.0, str(result)
        assert "fork" in said["text"], str(result)
        assert said["codes"] == [0, 3, 1], str(result)


@pytest.mark.whole_job
@pytest.mark.np(2, 3)
def test_peer_that_shuts_down_early(np_size):
    result = run_job(
        np_size,
        """
        import numpy as np
        import hvdlite as hvd
        from jobtools import say

        hvd.init()
        rank = hvd.rank()
        hvd.allreduce(np.ones(10), name="first")
        if rank != 1:
            try:
                hvd.allreduce(np.ones(10), name="second")
            except hvd.HvdliteInternalError as error:
                say(rank, text=str(error))
        hvd.shutdown()
        """,
        timeout=20,
    )
    assert result.returncode == 0, str(result)
    for rank in set(range(np_size)) - {1}:
        text = result.said[rank][0]["text"]
        assert "has been shut down" in text, text
        assert "rank 1" in text, text
