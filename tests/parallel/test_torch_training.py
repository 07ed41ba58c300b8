"""What training scripts do around a step: hooks, checkpoints, objects, short batches."""

from __future__ import annotations

import io
import warnings

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    Branches,
    assert_close,
    assert_same_on_all_ranks,
    branch_loss,
    inputs_of,
    make_adamw,
    make_cnn,
    make_sgd,
    parameters_of,
    saved,
    simulate,
    train,
    whole_batch,
)

nn = torch.nn
F64 = torch.float64


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_user_on_parameters(hvd, world, comm, when):
    # A hook that changes gradients acts on each rank's own, as it would in one process.
    model, alone = Branches(), Branches()
    calls = []

    def install(which):
        which.a.weight.register_hook(lambda gradient: gradient * 2)
        which.trunk.weight.register_post_accumulate_grad_hook(
            lambda p: calls.append(p.grad.isfinite().all().item())
        )

    def loss(model, step, rank):
        return model(inputs_of(step, rank), "a").square().sum()

    if when == "before":
        install(model)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    if when == "after":
        install(model)
    alone.a.weight.register_hook(lambda gradient: gradient * 2)
    plain = make_sgd(alone)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
    assert calls == [True] * 4


def _checkpoint_and_reference():
    """Return a checkpoint after three steps in one process, and the model of six steps."""
    alone = make_cnn(F64)
    plain = make_adamw(alone)
    train(alone, plain, range(3))
    state = saved({"model": alone.state_dict(), "optimizer": plain.state_dict()})
    train(alone, plain, range(3, 6))
    return state, alone


@pytest.mark.parametrize("when", ["before", "after", "after a step"])
@pytest.mark.parametrize("who", ["all", "rank 0"])
def test_loading_a_checkpoint(hvd, world, comm, when, who):
    state, alone = _checkpoint_and_reference()
    model = make_cnn(F64, seed=50 + world.rank)
    optimizer = make_adamw(model)

    def load():
        if who == "all" or world.rank == 0:
            parts = torch.load(io.BytesIO(state))
            model.load_state_dict(parts["model"])
            optimizer.load_state_dict(parts["optimizer"])
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    if when == "before":
        load()
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    if when == "after a step":
        train(model, optimizer, [77], world.rank, world.size)
    if when != "before":
        load()
    train(model, optimizer, range(3, 6), world.rank, world.size)
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-10)
    assert_same_on_all_ranks(comm, model.parameters())


def test_accumulation_with_a_short_last_batch(hvd, world, comm):
    # Five batches, two a step: the last step has one pass only, of a smaller batch.
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model), model.named_parameters(), backward_passes_per_step=2
    )
    plain = make_sgd(alone)
    batches = [whole_batch(i, F64, 24 if i < 4 else 12) for i in range(5)]

    def epoch(which, optimizer, rank, size):
        for group in (batches[0:2], batches[2:4], batches[4:5]):
            optimizer.zero_grad()
            for images, labels in group:
                outputs = which(images[rank::size])
                loss = nn.functional.cross_entropy(outputs, labels[rank::size]) / len(group)
                loss.backward()
            optimizer.step()

    for _ in range(2):
        epoch(model, optimizer, world.rank, world.size)
        epoch(alone, plain, 0, 1)
        assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-10)
    assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(3, 4)
def test_objects_within_process_sets(hvd, world, comm):
    sets = [hvd.add_process_set([0, 2]), hvd.add_process_set([1] if world.size == 3 else [1, 3])]
    mine = sets[world.rank % 2]
    root = mine.ranks[-1]
    value = {"rank": world.rank, "weights": torch.full((2,), float(world.rank))}
    sent = hvd.broadcast_object(value, root_rank=root, name="state", process_set=mine)
    assert sent["rank"] == root and sent["weights"].tolist() == [float(root)] * 2
    # Of different sizes, under one name in both sets.
    gathered = hvd.allgather_object("x" * world.rank, name="texts", process_set=mine)
    assert gathered == ["x" * rank for rank in mine.ranks]
    with pytest.raises(ValueError, match=str(world.rank)):
        hvd.allgather_object(1, process_set=sets[1 - world.rank % 2])
    for each in sets:
        hvd.remove_process_set(each)


def test_one_layer_in_two_groups_of_options(hvd, world, comm):
    # Groups with options of their own, added and unfrozen while training goes on.
    def make(model):
        groups = [
            {"params": [model.trunk.weight], "lr": 0.02, "weight_decay": 0.0},
            {"params": [model.trunk.bias], "momentum": 0.5},
        ]
        return torch.optim.SGD(groups, lr=0.01, momentum=0.9, weight_decay=0.1)

    model, alone = Branches(), Branches()
    for each in (model, alone):
        each.b.requires_grad_(False)
    optimizer, plain = hvd.DistributedOptimizer(make(model), model.named_parameters()), make(alone)
    loss = branch_loss(lambda step, rank: ("a", "b", "both")[(step + rank) % 3])
    for step in range(9):
        for each, opt in ((model, optimizer), (alone, plain)):
            if step == 2:
                opt.add_param_group({"params": list(each.a.parameters())})
            if step == 4:
                opt.add_param_group({"params": list(each.b.parameters()), "lr": 0.001})
            if step == 6:
                each.b.requires_grad_(True)
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
    assert_same_on_all_ranks(comm, model.parameters())


def test_scaling_accumulation_and_clipping_together(hvd, world, comm):
    def run(which, optimizer, rank, size):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
        for step in range(5):
            optimizer.zero_grad()
            for half in (2 * step, 2 * step + 1):
                images, labels = whole_batch(half)
                outputs = which(images[rank::size])
                loss = nn.functional.cross_entropy(outputs, labels[rank::size]) / 2
                scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(which.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()

    model, alone = make_cnn(), make_cnn()
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model), model.named_parameters(), backward_passes_per_step=2
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(model, optimizer, world.rank, world.size)
    run(alone, make_sgd(alone), 0, 1)
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-5)
    assert_same_on_all_ranks(comm, model.parameters())
