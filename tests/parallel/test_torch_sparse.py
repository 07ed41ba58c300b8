"""Sparse gradients, as of embeddings (B25)."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    assert_close,
    assert_same_on_all_ranks,
    inputs_of,
    make_sgd,
    parameters_of,
    simulate,
)

nn = torch.nn
F64 = torch.float64


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


class Words(nn.Module):
    def __init__(self, sparse):
        super().__init__()
        torch.manual_seed(10)
        self.embedding = nn.Embedding(12, 3, sparse=sparse)
        self.late = nn.Embedding(5, 3, sparse=sparse)
        self.out = nn.Linear(3, 1)
        self.to(F64)


def _tokens_loss(size):
    def loss(model, step, rank):
        value = model.out(inputs_of(step, rank, (2, 3))).square().sum()
        if rank == size - 1 and size > 1 and step % 2:
            return value  # a rank that sees no tokens
        tokens = torch.tensor([rank, 3, 3, 5 + step, rank])
        value = value + (model.embedding(tokens) * inputs_of(step, rank, (5, 3))).sum()
        if step >= 2 and rank == 0:
            value = value + (model.late(torch.tensor([1, 4, 4])) ** 2).sum()
        return value

    return loss


@pytest.mark.parametrize("op", ["Average", "Sum"])
def test_sparse_gradients(hvd, world, comm, op):
    size = world.size
    divisor = size if op == "Average" else 1

    def optimizers(model):
        tables = [model.embedding.weight, model.late.weight]
        return torch.optim.SparseAdam(tables, lr=0.1), make_sgd(model.out)

    model, alone = Words(sparse=True), Words(sparse=True)
    names = dict(model.named_parameters())
    mine = [hvd.DistributedOptimizer(o, names, op=getattr(hvd, op)) for o in optimizers(model)]
    plain = optimizers(alone)
    loss = _tokens_loss(size)
    for step in range(5):
        for optimizer in mine:
            optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        for optimizer in mine:
            optimizer.step()
        for parameter in alone.parameters():
            parameter.grad = None
        sum(loss(alone, step, rank) for rank in world.ranks).div(divisor).backward()
        for optimizer in plain:
            optimizer.step()
        for (name, one), two in zip(model.named_parameters(), alone.parameters(), strict=True):
            assert_close(one.detach(), two.detach(), f"step {step}: {name}", 1e-11)
        assert (model.late.weight.grad is None) == (step < 2)
        gradient = model.embedding.weight.grad
        assert gradient is None or gradient.is_sparse
        assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.parametrize("kind", ["sparse_as_dense", "SGD"])
def test_sparse_as_dense_gives_the_same_weights(hvd, world, comm, kind):
    model, alone = Words(sparse=True), Words(sparse=False)

    def plain_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    optimizer = hvd.DistributedOptimizer(
        plain_sgd(model),
        model.named_parameters(),
        sparse_as_dense=kind == "sparse_as_dense",
    )
    plain = plain_sgd(alone)
    loss = _tokens_loss(world.size)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)
        assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("late", [False, True])
def test_sparse_on_one_rank_and_dense_on_another(hvd, world, comm, late):
    def make(sparse):
        torch.manual_seed(11)
        return nn.ModuleDict(
            {"table": nn.Embedding(6, 2, sparse=sparse), "out": nn.Linear(2, 1)}
        ).to(F64)

    def loss(model, step, rank):
        value = model["out"](inputs_of(step, rank, (2, 2))).square().sum()
        if late and step == 0:
            return value
        tokens = torch.tensor([rank, 2, step, 2])
        return value + (model["table"](tokens) ** 2).sum()

    def plain_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.1)

    model, alone = make(sparse=world.rank == 0), make(sparse=False)
    optimizer = hvd.DistributedOptimizer(plain_sgd(model), model.named_parameters())
    plain = plain_sgd(alone)
    for step in range(4):
        optimizer.zero_grad()
        loss(model, step, world.rank).backward()
        optimizer.step()
        simulate(alone, plain, loss, [step], world.size)
        assert_close(parameters_of(model), parameters_of(alone), f"step {step}", 1e-11)


# -- steps of sparse gradients ----------------------------------------------------------------


def _tables(count=2):
    torch.manual_seed(11)
    return [nn.Embedding(6, 2, sparse=True, dtype=F64) for _ in range(count)]


def _sum_of(tables, rank, step):
    return sum((table(torch.tensor([rank, step % 6])) ** 2).sum() for table in tables)


@pytest.mark.np(2, 3, 4)
def test_optimizers_with_sparse_gradients_step_in_another_order_on_each_rank(hvd, world, comm):
    groups, alone = [_tables(), _tables()], [_tables(), _tables()]

    def optimizer_of(tables):
        return torch.optim.SparseAdam([table.weight for table in tables], lr=0.1)

    optimizers = [hvd.DistributedOptimizer(optimizer_of(tables)) for tables in groups]
    plain = [optimizer_of(tables) for tables in alone]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for tables in groups:
            _sum_of(tables, world.rank, step).backward()
        for optimizer in optimizers[:: 1 if (world.rank + step) % 2 else -1]:
            optimizer.step()
        for tables, optimizer in zip(alone, plain, strict=True):
            optimizer.zero_grad()
            sum(_sum_of(tables, rank, step) / world.size for rank in world.ranks).backward()
            optimizer.step()
    for mine, reference in zip(itertools.chain(*groups), itertools.chain(*alone), strict=True):
        assert_close(mine.weight.detach(), reference.weight.detach(), "", 1e-11)
        assert_same_on_all_ranks(comm, [mine.weight])


@pytest.mark.np(2, 3)
@pytest.mark.parametrize("when", ["before", "after"])
def test_who_discards_sparse_gradients_alone_is_found_out(hvd, world, comm, when):
    """Rank 1 fails before or after its gradients are under way; the others know nothing of it."""
    tables = _tables()
    weights = [table.weight for table in tables]
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(weights, lr=0.1))
    for step in range(2):
        optimizer.zero_grad()
        _sum_of(tables, world.rank, step).backward()
        optimizer.step()
    before = [weight.detach().clone() for weight in weights]

    def fail(_):
        raise ZeroDivisionError("in a hook")

    def backward():
        optimizer.zero_grad()
        _sum_of(tables, world.rank, 2).backward()

    if world.rank == 1:
        # After the hooks of hvdlite; both gradients have come where the last of them fails.
        order = []
        hooks = [
            w.register_post_accumulate_grad_hook(lambda w: order.append(id(w))) for w in weights
        ]
        backward()
        optimizer.synchronize()
        by_time = sorted(weights, key=lambda weight: order.index(id(weight)))
        failing = by_time[0 if when == "before" else -1]
        hooks.append(failing.register_post_accumulate_grad_hook(fail))
        with pytest.raises(ZeroDivisionError):
            backward()
        for hook in hooks:
            hook.remove()
        optimizer.zero_grad()
    else:
        backward()
        optimizer.synchronize()
        backward()
        if when == "before":
            with pytest.raises(hvd.MismatchError, match=f"rank {world.rank}.*all have to"):
                optimizer.step()
            assert all(torch.equal(w, b) for w, b in zip(weights, before, strict=True))
        else:  # the others cannot know yet
            optimizer.step()
    backward()
    if when == "before":
        optimizer.step()
        assert_same_on_all_ranks(comm, weights)
    else:
        with pytest.raises(hvd.MismatchError, match="all have to"):
            optimizer.step()


@pytest.mark.np(2)
def test_a_sparse_gradient_that_comes_after_the_others_are_under_way(hvd, world, comm):
    tables = _tables()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table.weight for table in tables], lr=0.1)
    )
    _sum_of(tables, world.rank, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    tables[1].weight.requires_grad_(False)
    _sum_of(tables, world.rank, 1).backward()
    tables[1].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match=f"rank {world.rank}: .*requires_grad changed"):
        _sum_of(tables[1:], world.rank, 1).backward()
    optimizer.zero_grad()
    _sum_of(tables, world.rank, 2).backward()
    optimizer.step()  # both ranks have discarded the same
    assert_same_on_all_ranks(comm, [table.weight for table in tables])


@pytest.mark.np(2, 3, 4)
@pytest.mark.parametrize("lazy", [True, False])
def test_a_sparse_parameter_that_joins_later(hvd, world, lazy):
    first, late = nn.Embedding(6, 2, sparse=True), nn.Embedding(5, 2, sparse=True)
    late.requires_grad_(False)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([first.weight, late.weight], lr=0.1),
        [("first", first.weight), ("late", late.weight)],
        op=hvd.Sum,
    )
    for step in range(4):
        if step == 2:
            late.requires_grad_(True)
        optimizer.zero_grad()
        # One rank does not use what the others send early, in the step in which the other joins.
        uses_first = not (lazy and step == 2 and world.rank == 0)
        loss = torch.zeros(())
        if uses_first:
            loss = loss + first(torch.tensor([world.rank])).sum()
        if step >= 2:
            loss = loss + late(torch.tensor([step])).sum()
        if loss.requires_grad:
            loss.backward()
        optimizer.synchronize()
        wanted = torch.zeros(6, 2)
        wanted[1 if lazy and step == 2 else 0 : world.size] = 1
        assert torch.equal(first.weight.grad.to_dense(), wanted)
        if step >= 2:
            wanted = torch.zeros(5, 2)
            wanted[step] = world.size
            assert torch.equal(late.weight.grad.to_dense(), wanted)
