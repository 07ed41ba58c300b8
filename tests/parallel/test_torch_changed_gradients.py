"""Gradients that are changed while they are being reduced: refused, never silently lost."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    Branches,
    assert_close,
    assert_same_on_all_ranks,
    branch_loss,
    inputs_of,
    make_cnn,
    make_sgd,
    parameters_of,
    simulate,
    train,
)

nn = torch.nn
F64 = torch.float64
# Buckets of one gradient each, and one bucket for all of them.
SIZES = {"one each": 1, "together": 1 << 20}


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


def _assign(parameter):
    parameter.grad = 2 * parameter.grad


def _clone(parameter):
    parameter.grad = parameter.grad.clone()


def _multiply(parameter):
    parameter.grad *= 2


def _data(parameter):
    parameter.grad.data = 2 * parameter.grad.data


def _clip(parameter):
    nn.utils.clip_grad_norm_([parameter], 0.01)


def _clip_one_by_one(parameter):
    nn.utils.clip_grad_norm_([parameter], 0.01, foreach=False)


def _clip_value(parameter):
    nn.utils.clip_grad_value_([parameter], 0.01)


def _zero(parameter):
    parameter.grad.zero_()


CHANGES = {
    change.__name__.strip("_"): change
    for change in (_assign, _clone, _multiply, _data, _clip, _clip_one_by_one, _clip_value, _zero)
}


def _backward(model, optimizer, step, rank, branch="a"):
    optimizer.zero_grad()
    model(inputs_of(step, rank), branch).square().sum().backward()


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("how", CHANGES)
def test_a_change_between_backward_and_step_is_refused(hvd, world, comm, how, size):
    # In the first step no gradient has a place in a bucket yet, in later ones they have.
    for first in (0, 2):
        model, alone = Branches(), Branches()
        optimizer = hvd.DistributedOptimizer(
            make_sgd(model), model.named_parameters(), bucket_bytes=SIZES[size]
        )
        plain = make_sgd(alone)
        loss = branch_loss(lambda step, rank: "a")
        for step in range(4):
            if step == first:
                before = parameters_of(model)
                _backward(model, optimizer, step, world.rank)
                CHANGES[how](model.a.weight)
                with pytest.raises(RuntimeError, match=rf"rank {world.rank}.*'a.weight'") as error:
                    optimizer.step()
                assert "a.bias" not in str(error.value)
                assert "synchronize()" in str(error.value)
                assert torch.equal(parameters_of(model), before)
            # Nothing remains of it, in no rank.
            _backward(model, optimizer, step, world.rank)
            optimizer.step()
            simulate(alone, plain, loss, [step], world.size)
            assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
            assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(2, 3)
def test_ranks_that_changed_nothing_do_not_wait(hvd, world, comm):
    model = Branches()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for step in range(3):
        _backward(model, optimizer, step, world.rank)
        if world.rank == step % 2:
            _assign(model.trunk.bias)
            with pytest.raises(RuntimeError, match=r"'trunk.bias' \(replaced\)"):
                optimizer.step()
        else:
            optimizer.step()


@pytest.mark.np(2)
def test_a_change_before_synchronize_is_refused_too(hvd, world, comm):
    model = make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    for _ in range(2):
        model(torch.ones(2, 1, 8, 8, dtype=F64)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with pytest.raises(RuntimeError, match=r"'0.weight' \(changed in place\).* and 3 more\."):
            optimizer.synchronize()
        optimizer.zero_grad()


@pytest.mark.np(2)
def test_a_hook_that_came_too_late_is_refused(hvd, world, comm):
    for late in (False, True):
        model = Branches()
        hook = model.trunk.weight.register_post_accumulate_grad_hook
        if not late:
            hook(_multiply)
        optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
        if late:
            hook(_multiply)
        for step in range(3):
            mine = comm.bcast(parameters_of(model))
            _backward(model, optimizer, step, world.rank)
            if late:
                with pytest.raises(RuntimeError, match="'trunk.weight'"):
                    optimizer.step()
                continue
            optimizer.step()
            alone = Branches()
            nn.utils.vector_to_parameters(mine, alone.parameters())
            gradients = []
            for rank in world.ranks:
                value = alone(inputs_of(step, rank), "a").square().sum()
                (gradient,) = torch.autograd.grad(value, [alone.trunk.weight])
                gradients.append(2 * gradient)
            assert_close(model.trunk.weight.grad, sum(gradients) / world.size, f"step {step}")


@pytest.mark.np(2)
def test_a_sparse_gradient_that_is_changed_is_refused(hvd, world, comm):
    model = nn.Embedding(6, 2, sparse=True)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
    )
    for step in range(3):
        for change in (_assign, _clone, lambda p: p.grad.mul_(2)):
            optimizer.zero_grad()
            model(torch.tensor([world.rank, step])).sum().backward()
            change(model.weight)
            with pytest.raises(RuntimeError, match="'weight'"):
                optimizer.step()
        optimizer.zero_grad()
        model(torch.tensor([world.rank, step])).sum().backward()
        optimizer.step()
        assert_same_on_all_ranks(comm, model.parameters())


# -- what is no change ----------------------------------------------------------------------


@pytest.mark.np(2)
def test_what_hvdlite_does_itself_is_no_change(hvd, world, comm):
    """Waiting for something else lets buckets, and rounds of compressors, go on meanwhile."""
    compressions = [
        hvd.Compression.none,
        hvd.Compression.fp16,
        hvd.Compression.int8(),
        hvd.Compression.topk(ratio=0.5),
        hvd.Compression.powersgd(rank=1),
    ]
    for compression in compressions:
        model = make_cnn()
        optimizer = hvd.DistributedOptimizer(
            make_sgd(model), model.named_parameters(), compression, bucket_bytes=300
        )
        for step in range(3):

            def meanwhile():
                for _ in range(10):
                    hvd.allreduce(torch.ones(3))
                comm.Barrier()

            train(model, optimizer, [step], world.rank, world.size, meanwhile)
            assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(2)
def test_accumulation_is_no_change(hvd, world, comm):
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(
        make_sgd(model), model.named_parameters(), backward_passes_per_step=2
    )
    plain = make_sgd(alone)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            inputs = inputs_of(2 * step + part, world.rank)
            # create_graph accumulates into a new tensor each time.
            model(inputs, "a").square().sum().backward(create_graph=step == 1)
        optimizer.step()
        loss = branch_loss(lambda step, rank: "a")

        def both(model, step, rank, loss=loss):
            return loss(model, 2 * step, rank) + loss(model, 2 * step + 1, rank)

        simulate(alone, plain, both, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


@pytest.mark.np(2)
@pytest.mark.parametrize("size", [3, 600])
@pytest.mark.parametrize("passes", [1, 2])
def test_pieces_of_one_tensor_that_accumulate(hvd, world, passes, size):
    """Autograd counts the changes of a tensor and of its pieces as one."""
    parts = [torch.nn.Parameter(torch.zeros(size, size)) for _ in range(3)]
    names = [(f"part{number}", part) for number, part in enumerate(parts)]
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(parts, lr=1.0), names, backward_passes_per_step=passes, op=hvd.Sum
    )
    factors = torch.arange(1.0, 4.0).repeat_interleave(size)[:, None]
    for step in range(3):
        optimizer.zero_grad()
        for _ in range(passes):
            (torch.cat(parts) * factors * (world.rank + 1)).sum().backward()
        optimizer.step()
        for number, part in enumerate(parts):
            once = (number + 1) * sum(rank + 1 for rank in world.ranks)
            assert (part.grad == passes * once).all()
            assert (part == -(step + 1) * passes * once).all()


@pytest.mark.np(2)
def test_gradients_made_by_hand_and_discarded_ones(hvd, world, comm):
    model = Branches()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters()
    )
    mean = sum(range(world.size)) / world.size
    for step in range(3):
        before = parameters_of(model)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, step)
            parameter.grad = torch.full_like(parameter, world.rank)
        optimizer.step()
        assert_close(parameters_of(model), before - mean, f"step {step}", 1e-11)
        model.zero_grad()
        # By backward, and thrown away as model.zero_grad() does.
        model(inputs_of(step, world.rank), "both").sum().backward()
        model.zero_grad()
        before = parameters_of(model)
        optimizer.step()
        assert torch.equal(parameters_of(model), before)


@pytest.mark.np(2)
def test_inference_between_backward_and_step(hvd, world, comm):
    model, alone = Branches(), Branches()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    plain = make_sgd(alone)
    loss = branch_loss(lambda step, rank: "a")
    for step in range(3):
        _backward(model, optimizer, step, world.rank)
        with torch.inference_mode():
            for _ in range(10):  # in which the ranks come to agree on buckets
                hvd.allreduce(model(inputs_of(step, world.rank), "b"))
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
