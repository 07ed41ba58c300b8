"""A wrapped optimizer stays what it was: class, hooks, schedulers, state, scalers, copies.

Rows B7, B10, B11, B15 and closures.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings

import pytest

torch = pytest.importorskip("torch")

import hvdlite_torch  # noqa: E402

from .torch_helpers import (  # noqa: E402
    assert_close,
    assert_same_on_all_ranks,
    make_cnn,
    parameters_of,
    saved,
    train,
    whole_batch,
)

nn = torch.nn
F64 = torch.float64


@pytest.fixture
def hvd(hvd):
    return hvdlite_torch


def _adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def _sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _compare(model, alone, what=""):
    assert_close(parameters_of(model), parameters_of(alone), what, 1e-10)


# -- what the optimizer is --------------------------------------------------------------------


def test_class_and_attributes(hvd, world):
    model = make_cnn()
    plain = _adamw(model)
    defaults, groups, state = plain.defaults, plain.param_groups, plain.state
    wrapped = hvd.DistributedOptimizer(plain, model.named_parameters())
    assert type(wrapped) is torch.optim.AdamW and wrapped is plain
    assert wrapped.defaults is defaults and wrapped.state is state
    assert wrapped.param_groups is groups
    assert "AdamW" in repr(wrapped)


class Custom(torch.optim.SGD):
    """A step that calls the parent's, as many optimizers of users do."""

    def step(self, closure=None):
        self.counter = getattr(self, "counter", 0) + 1
        return super().step(closure)


def test_subclass_whose_step_calls_its_parents(hvd, world, comm):
    def make(model):
        return Custom(model.parameters(), lr=0.05, momentum=0.9)

    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters(), op=hvd.Sum)
    for group in optimizer.param_groups:
        group["lr"] /= world.size
    train(model, optimizer, range(4), world.rank, world.size)
    train(alone, make(alone), range(4))
    _compare(model, alone)
    assert optimizer.counter == 4


def test_hooks_of_the_user_fire_once_and_see_reduced_gradients(hvd, world, comm):
    model = make_cnn(F64)
    plain = _sgd(model)
    seen, calls = [], []
    plain.register_step_pre_hook(
        lambda *_: seen.append([p.grad.clone() for p in model.parameters()])
    )
    plain.register_step_post_hook(lambda *_: calls.append("post"))
    optimizer = hvd.DistributedOptimizer(plain, model.named_parameters())
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    train(model, optimizer, range(3), world.rank, world.size)
    assert calls == ["pre", "post"] * 3 and len(seen) == 3
    assert_same_on_all_ranks(comm, [t for tensors in seen for t in tensors])


@pytest.mark.parametrize("when", ["before", "after"])
def test_schedulers(hvd, world, comm, when):
    def scheduler_of(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=12)

    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer, plain = _sgd(model), _sgd(alone)
    scheduler = scheduler_of(optimizer) if when == "before" else None
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    scheduler = scheduler or scheduler_of(optimizer)
    other = scheduler_of(plain)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # such as "lr_scheduler.step() before optimizer.step()"
        for step in range(6):
            train(model, optimizer, [step], world.rank, world.size)
            scheduler.step()
            train(alone, plain, [step])
            other.step()
    assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]
    _compare(model, alone)


def test_state_that_is_there_is_kept(hvd, world, comm):
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer, plain = _adamw(model), _adamw(alone)
    train(model, optimizer, range(3))
    train(alone, plain, range(6))
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())
    assert len(optimizer.state) == len(list(model.parameters()))
    train(model, optimizer, range(3, 6), world.rank, world.size)
    _compare(model, alone)


# -- copies -----------------------------------------------------------------------------------


def test_state_dict_goes_to_a_plain_optimizer_and_back(hvd, world, comm):
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(_adamw(model), model.named_parameters())
    train(model, optimizer, range(3), world.rank, world.size)
    state = torch.load(io.BytesIO(saved([model.state_dict(), optimizer.state_dict()])))

    single, plain = make_cnn(F64), _adamw(alone)
    train(alone, plain, range(3))
    assert optimizer.state_dict().keys() == plain.state_dict().keys()
    assert optimizer.state_dict()["param_groups"] == plain.state_dict()["param_groups"]
    single.load_state_dict(state[0])
    continued = _adamw(single)
    continued.load_state_dict(state[1])
    train(single, continued, range(3, 6))  # in one process
    train(alone, plain, range(3, 6))
    _compare(single, alone, "wrapped to plain")

    back = hvd.DistributedOptimizer(_adamw(model), model.named_parameters())
    model.load_state_dict(single.state_dict())
    back.load_state_dict(continued.state_dict())
    train(model, back, range(6, 9), world.rank, world.size)
    train(alone, plain, range(6, 9))
    _compare(model, alone, "plain to wrapped")


def _unpickled(pair):
    return pickle.loads(pickle.dumps(pair))


def _loaded(pair):
    return torch.load(io.BytesIO(saved(pair)), weights_only=False)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _unpickled, _loaded])
def test_copies_step_on(hvd, world, comm, duplicate):
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(
        _adamw(model), model.named_parameters(), bucket_bytes=300, backward_passes_per_step=1
    )
    train(model, optimizer, range(3), world.rank, world.size)
    if world.rank == 0:
        duplicate((model, optimizer))  # one rank's affair, to save it, say
    other_model, other = duplicate((model, optimizer))
    assert type(other) is torch.optim.AdamW and other is not optimizer
    assert other.param_groups[0]["params"][0] is next(other_model.parameters())
    train(other_model, other, range(3, 6), world.rank, world.size)
    assert_same_on_all_ranks(comm, other_model.parameters())
    train(alone, _adamw(alone), range(6))
    _compare(other_model, alone)
    train(model, optimizer, range(3, 6), world.rank, world.size)
    _compare(model, alone)
    with other.skip_synchronize():
        pass


@pytest.mark.np(2)
def test_copies_over_a_process_set_are_refused(hvd, world):
    process_set = hvd.add_process_set([0])
    model = make_cnn()
    optimizer = hvd.DistributedOptimizer(_sgd(model), process_set=process_set)
    with pytest.raises(TypeError, match="state_dict"):
        copy.deepcopy(optimizer)
    hvd.remove_process_set(process_set)


# -- closures ---------------------------------------------------------------------------------


@pytest.mark.parametrize("keyword", [False, True])
def test_closure(hvd, world, comm, keyword):
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(_adamw(model), model.named_parameters())
    plain = _adamw(alone)

    def step(which, optimizer, number, rank=0, size=1):
        images, labels = whole_batch(number, F64)

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(which(images[rank::size]), labels[rank::size])
            loss.backward()
            return loss

        return optimizer.step(closure=closure) if keyword else optimizer.step(closure)

    for number in range(4):
        mine = step(model, optimizer, number, world.rank, world.size)
        other = step(alone, plain, number)
        assert_close(mine.detach(), other.detach(), tolerance=1e-10)
        _compare(model, alone, f"step {number}")


@pytest.mark.parametrize("line_search", [None, "strong_wolfe"])
@pytest.mark.parametrize("as_number", [False, True])
def test_lbfgs(hvd, world, comm, line_search, as_number):
    # Its number of evaluations depends on the loss: ranks have to agree on it.
    def make(model):
        return torch.optim.LBFGS(model.parameters(), lr=0.3, max_iter=5, line_search_fn=line_search)

    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters())
    plain = make(alone)
    evaluations = []

    def step(which, optimizer, number, rank=0, size=1):
        images, labels = whole_batch(number, F64)

        def closure():
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(which(images[rank::size]), labels[rank::size])
            loss.backward()
            evaluations.append(rank)
            return loss.item() if as_number else loss

        optimizer.step(closure)

    for number in range(3):
        step(model, optimizer, number, world.rank, world.size)
        mine = len(evaluations)
        assert len(set(comm.allgather(mine))) == 1
        evaluations.clear()
        step(alone, plain, number)
        assert len(evaluations) == mine
        evaluations.clear()
        assert_close(parameters_of(model), parameters_of(alone), f"step {number}", 1e-8)
        assert_same_on_all_ranks(comm, model.parameters())


# -- gradient scaling -------------------------------------------------------------------------


def _scaled_training(which, optimizer, scaler, steps, rank=0, size=1, clip=None):
    scales = []
    for step in steps:
        images, labels = whole_batch(step, torch.float32)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(which(images[rank::size]), labels[rank::size])
        scaler.scale(loss).backward()
        if clip == "unscale":
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(which.parameters(), 0.5)
        elif clip == "synchronize":
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(which.parameters(), 0.5)
        if clip == "synchronize":
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("clip", [None, "unscale", "synchronize"])
@pytest.mark.parametrize("make", [_sgd, _adamw])
def test_grad_scaler(hvd, world, comm, clip, make):
    model, alone = make_cnn(), make_cnn()
    optimizer = hvd.DistributedOptimizer(make(model), model.named_parameters())

    def scaler():
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scales = _scaled_training(
            model, optimizer, scaler(), range(8), world.rank, world.size, clip=clip
        )
    others = _scaled_training(
        alone, make(alone), scaler(), range(8), clip="unscale" if clip else None
    )
    assert scales == others
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-5)
    assert_same_on_all_ranks(comm, model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_all_ranks_skip_the_step_in_which_one_overflows(hvd, world, comm, fused):
    def make_model():
        torch.manual_seed(4)
        return nn.Linear(4, 3)

    def make_sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.05, fused=fused)

    def run(model, optimizer, ranks):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=100)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            for rank in ranks:
                inputs = torch.randn(6, 4, generator=torch.Generator().manual_seed(step + rank))
                if step in (1, 4) and rank == world.size - 1:
                    inputs = inputs * 1e30  # times the scale: beyond the range of float32
                loss = model(inputs).mean()
                (scaler.scale(loss) / len(ranks)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    model, alone = make_model(), make_model()
    optimizer = hvd.DistributedOptimizer(make_sgd(model), model.named_parameters())
    scales = run(model, optimizer, [world.rank])
    assert [scale / 2**40 for scale in scales] == [1, 0.5, 0.5, 0.5, 0.25, 0.25]
    assert scales == run(alone, make_sgd(alone), world.ranks)
    assert_close(parameters_of(model), parameters_of(alone), tolerance=1e-5)
    assert_same_on_all_ranks(comm, model.parameters())


# -- torch.compile ----------------------------------------------------------------------------


def test_compiled_training_step(hvd, world, comm):
    model, alone = make_cnn(F64), make_cnn(F64)
    optimizer = hvd.DistributedOptimizer(_sgd(model), model.named_parameters())

    @torch.compile(backend="eager")
    def step(images, labels):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        return hvd.allreduce(loss.detach() * 2, op=hvd.Sum) / 2

    plain = _sgd(alone)
    for number in range(3):
        images, labels = whole_batch(number, F64)
        total = step(images[world.rank :: world.size], labels[world.rank :: world.size])
        wanted = nn.functional.cross_entropy(alone(images), labels).detach()
        assert_close(total / world.size, wanted, tolerance=1e-10)
        train(alone, plain, [number])
        _compare(model, alone, f"step {number}")
