"""Whole training steps of TensorFlow: hvdlite, no reduction at all, and tf.distribute.

    python -m benchmarks.tf_step --np 2 --turns 3

The model is a convolutional network with batch normalization and 11 million parameters, the
step a tf.function with plain SGD. `none` takes the same step and reduces nothing: what is
above it is the price of reduction. `strategy` is MultiWorkerMirroredStrategy in a loop of
one's own, with RING communication.
"""

from __future__ import annotations

import argparse
import atexit
import itertools
import json
import os
import socket
from collections.abc import Callable
from typing import Any

from hvdlite.bench.jobs import Report
from hvdlite.bench.many import ratio_table
from hvdlite.bench.records import Results
from hvdlite.bench.turns import Options, Session

PEERS = ("hvdlite", "none", "strategy")
CHANNELS = (3, 64, 128, 256, 512, 512, 512, 512)
CLASSES = 10


def make_variables(tf: Any) -> list[Any]:
    """Return kernel, scale and offset of each convolution, then two dense layers."""
    tf.random.set_seed(1)
    variables = []
    for inside, outside in itertools.pairwise(CHANNELS):
        kernel = tf.random.normal((3, 3, inside, outside)) * (2 / (9 * inside)) ** 0.5
        variables += [kernel, tf.ones(outside), tf.zeros(outside)]
    for inside, outside in ((2048, 1024), (1024, CLASSES)):
        variables += [tf.random.normal((inside, outside)) * inside**-0.5, tf.zeros(outside)]
    return [tf.Variable(value) for value in variables]


def loss_of(tf: Any, variables: list[Any], images: Any, labels: Any) -> Any:
    rest = iter(variables)
    hidden = images
    for number in range(len(CHANNELS) - 1):
        stride = 2 if number in (1, 2, 3) else 1
        hidden = tf.nn.conv2d(hidden, next(rest), stride, "SAME")
        hidden, _, _ = tf.compat.v1.nn.fused_batch_norm(hidden, next(rest), next(rest))
        hidden = tf.nn.relu(hidden)
    hidden = tf.reshape(hidden, (hidden.shape[0], -1))
    hidden = tf.nn.relu(hidden @ next(rest) + next(rest))
    outputs = hidden @ next(rest) + next(rest)
    return tf.reduce_mean(
        tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=outputs)
    )


def make_step(peer: str, batch: int, comm: Any) -> Callable[[], object]:
    if peer == "strategy":
        os.environ["TF_CONFIG"] = _cluster(comm)
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(2)
    strategy = options = None
    if peer == "strategy":
        options = tf.distribute.experimental.CommunicationOptions(
            implementation=tf.distribute.experimental.CommunicationImplementation.RING
        )
        strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    variables = make_variables(tf)
    images = tf.random.normal((batch, 16, 16, 3), seed=comm.Get_rank())
    labels = tf.range(batch) % CLASSES

    def reduced(tape: Any, loss: Any) -> list[Any]:
        if peer == "hvdlite":
            import hvdlite_tf as hvd

            tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, variables)
        if peer == "strategy":
            context = tf.distribute.get_replica_context()
            gradients = context.all_reduce("mean", gradients, options)
        return gradients

    def step() -> Any:
        with tf.GradientTape() as tape:
            loss = loss_of(tf, variables, images, labels)
        for variable, gradient in zip(variables, reduced(tape, loss), strict=True):
            variable.assign_sub(0.001 * gradient)
        return loss

    if peer == "hvdlite":
        import hvdlite_tf as hvd

        hvd.init()
        hvd.broadcast_variables(variables, 0)
    if strategy is not None:
        return tf.function(lambda: strategy.run(step))
    return tf.function(step)


def _cluster(comm: Any) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    workers = [f"127.0.0.1:{other}" for other in comm.allgather(port)]
    task = {"type": "worker", "index": comm.Get_rank()}
    return json.dumps({"cluster": {"worker": workers}, "task": task})


def work(task: dict[str, Any]) -> Report:
    """Measure one peer, inside a rank."""
    from mpi4py import MPI

    from hvdlite.bench.timing import repeat

    peer = task["peer"]
    samples = repeat(make_step(peer, task["batch"], MPI.COMM_WORLD), task["seconds"])
    if peer == "hvdlite":
        import hvdlite_tf as hvd

        hvd.shutdown()
    if peer == "strategy":
        # Its servers have threads that keep the process from ending.
        atexit.register(_leave)
    return Report({"step": samples})


def _leave() -> None:
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    MPI.Finalize()
    os._exit(0)


def main() -> None:
    """Let the peers take turns and print a table for each number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--np", type=int, nargs="+", default=[2], help="numbers of ranks")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each peer")
    parser.add_argument("--peers", nargs="+", default=list(PEERS), choices=list(PEERS))
    parser.add_argument("--batch", type=int, default=16, help="images per rank")
    parser.add_argument("--seconds", type=float, default=8.0, help="of each job")
    arguments = parser.parse_args()
    session = Session(Options(tuple(arguments.np), arguments.turns), Results({}))
    task = {"batch": arguments.batch, "seconds": arguments.seconds}
    for ranks in arguments.np:
        tasks = dict.fromkeys(arguments.peers, task)
        records = session.measure("benchmarks.tf_step", ranks, tasks)
        title = f"Training step of a CNN of 11 M parameters, np {ranks}"
        session.show(ratio_table(title, records, scale=1e3, unit="ms"))


if __name__ == "__main__":
    main()
