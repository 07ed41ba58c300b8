"""Gradients that are reduced together, where they are or gathered in persistent memory.

Where the ranks reach each other's memory and a bucket is large enough, it borrows the gradients
that backward has made, and nothing is copied. Elsewhere, and where a gradient cannot be lent, it
becomes a view of the bucket's memory, which costs one copy on the way in and none on the way out.
Behind the gradients a bucket carries two flags for each of them, which are reduced along: whether
any rank has a gradient, and whether it is a sparse one. The last flags tell the ranks apart that
discarded a step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import torch

import hvdlite
from hvdlite import Handle, MismatchError
from hvdlite.engine.submit import allocate_buffer, reduces_scattered, submit_allreduce

from .arguments import cast_type, whereabouts
from .compression import NoneCompressor
from .compressors import Exchange, GradientCompressor, Part
from .layout import Place, Reduction
from .progress import announce
from .slots import Slot
from .tensors import array_of, dtype_of, dtype_of_type, is_lendable, lend, tensor_of

__all__ = ["Bucket", "DiscardedStepError"]

_ALIGNMENT = 64
"""Bytes: vector instructions and cache lines like gradients to begin at multiples of it."""


class DiscardedStepError(MismatchError):
    """Ranks differ in which steps they take. Buckets are as usable as before."""

    def __init__(self) -> None:
        super().__init__(
            "Mismatched steps of a DistributedOptimizer: some ranks called zero_grad() after "
            f"a backward pass that failed, and others, such as rank {hvdlite.rank()}, went on "
            "to step(). If one rank skips a step, all have to."
        )


# The last flags: this step is discarded; the step before was; it was not.
_DISCARDED, _AFTER_DISCARD, _KEPT = [1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]


class Bucket:
    """Gradients that are reduced together.

    Args:
        name: identifies the bucket across ranks.
        slots: the parameters.
        places: how the ranks agreed to lay them out.
        reduction: how to combine them.
    """

    def __init__(
        self, name: str, slots: Sequence[Slot], places: Sequence[Place], reduction: Reduction
    ) -> None:
        self.name = name
        self.slots = list(slots)
        self.places = list(places)
        self.reduction = reduction
        dtype = places[0].dtype
        align = max(1, _ALIGNMENT // dtype.itemsize)
        self._offsets: list[int] = []
        end = 0
        for place in places:
            self._offsets.append(end)
            end += -(-place.elements // align) * align
        count = len(places)
        flags = 2 * count + len(_KEPT)
        nbytes = (end + flags) * dtype.itemsize
        sent = (sum(place.elements for place in places) + flags) * dtype.itemsize
        self._borrows = reduction.compression is NoneCompressor and reduces_scattered(
            count + 1, sent, reduction.process_set
        )
        buffer = allocate_buffer(nbytes, reduction.process_set, zeroed=not self._borrows)
        array = buffer.view(dtype_of_type(dtype).storage)
        self._flat = tensor_of(array, dtype)
        self._gradients = self._flat[:end]
        self._flags = self._flat[end:]
        self._usual_flags = torch.tensor([1.0] * count + [0.0] * count + _KEPT).to(dtype)
        # On another device gradients cannot be views of host memory: they are copied.
        self._direct = all(slot.parameter.device.type == "cpu" for slot in slots)
        self._lends = self._borrows and self._direct
        self.takes_early = not self._lends
        """Whether to `take` gradients as they come, for copying, while they are in the cache."""
        # The same objects every time: the engine knows by that that there is nothing to copy.
        self._arrays = [array]
        if self._borrows:
            self._arrays = [
                array[offset : offset + place.elements]
                for offset, place in zip(self._offsets, places, strict=True)
            ]
            self._arrays.append(array[end:])
        wire = cast_type(reduction.compression, dtype)
        self._dtypes = [dtype_of_type(wire or dtype)] * len(self._arrays)
        self._as_it_is = wire is not None or reduction.compression is NoneCompressor
        self._compressed: tuple[torch.Tensor, object] | None = None
        self._exchange: Any = None  # a generator, while its compressor works
        self._needs: Handle | None = None  # what it waits for
        self._problem: Exception | None = None  # what it ended with
        self._advancing = threading.Lock()
        for i, slot in enumerate(slots):
            slot.bucket = self
            self._make_view(i)
        self.rewind()

    def rewind(self) -> None:
        """Begin a step: no gradient is there."""
        self.handle: Handle | None = None
        self.ready = 0
        self._expected = 0
        for slot in self.slots:
            slot.lent = slot.memory = None

    def is_complete(self) -> bool:
        """Whether all gradients that this backward pass can bring are there."""
        if self._expected == 0:
            # Counted late, when backward runs: layers can be frozen at any time before.
            expected = [s for s in self.slots if s.parameter.requires_grad and not s.sparse_dim]
            self._expected = len(expected)
            # Nobody knows which piece of a gradient is the last one before backward ends.
            if any(s.recurs for s in expected):
                self._expected += 1
        return self.ready >= self._expected

    def _make_view(self, i: int) -> torch.Tensor:
        slot, place = self.slots[i], self.places[i]
        # data: as_strided alone would make the view an alias in the eyes of autograd, and all
        # views would count the changes of each.
        view = self._flat.as_strided(place.shape, place.stride, self._offsets[i]).data
        slot.view, slot.address = view, view.data_ptr()
        return view

    def take(self, slot: Slot) -> None:
        """Borrow the parameter's gradient, or make it a view of the bucket."""
        gradient = slot.parameter.grad
        assert gradient is not None
        if gradient.shape != slot.view.shape or gradient.dtype != slot.view.dtype:
            raise RuntimeError(
                f"{whereabouts()}: the gradient of {slot.name!r} is {gradient.dtype} of shape "
                f"{tuple(gradient.shape)}, but was {slot.view.dtype} of shape "
                f"{tuple(slot.view.shape)} when the optimizer was distributed: after a change of "
                "a parameter's type or shape, such as model.double(), make a new optimizer and "
                "pass it to DistributedOptimizer, on all ranks."
            )
        if gradient.layout is not torch.strided:
            gradient = gradient.to_dense()
        elif gradient is slot.lent and gradient.data_ptr() == slot.lent_at:
            return
        elif self._direct and gradient.data_ptr() == slot.address:
            slot.lent = slot.memory = None
            return
        elif self._lends and is_lendable(gradient, slot.view):
            slot.lent, slot.lent_at = gradient, gradient.data_ptr()
            slot.memory = lend(gradient)
            return
        slot.lent = slot.memory = None
        view = slot.view
        if view is None or view.data_ptr() != slot.address:
            # `gradient.data = ...` in user code has moved our view elsewhere.
            view = self._make_view(self.slots.index(slot))
        # While the gradient is where backward left it: after the move no change can be told.
        slot.inspect()
        view.copy_(gradient.detach())
        if self._direct:
            # From now on autograd accumulates right into the bucket.
            slot.parameter.grad = view
        slot.follow()

    def submit(self, after_discard: bool = False) -> None:
        """Complete the bucket with what this rank has, and begin its reduction.

        Args:
            after_discard: whether this rank has discarded the step before this one.
        """
        densify = self.reduction.sparse_as_dense
        dense, sparse = [], []
        for slot in self.slots:
            slot.present = slot.parameter.grad is not None
            is_sparse = slot.holds_sparse and not densify
            dense.append(slot.present and not is_sparse and not slot.sparse_dim)
            sparse.append(is_sparse and not slot.sparse_dim)
            if dense[-1]:
                self.take(slot)
            else:
                slot.lent = slot.memory = None
        if all(dense) and not after_discard:
            self._flags.copy_(self._usual_flags)
        else:
            absent = [slot.view for slot, there in zip(self.slots, dense, strict=True) if not there]
            if absent:
                torch._foreach_zero_(absent)
            tail = _AFTER_DISCARD if after_discard else _KEPT
            self._flags.copy_(torch.tensor([*map(float, dense), *map(float, sparse), *tail]))
        self._begin()

    def discard(self) -> None:
        """Begin a reduction of nothing: the other ranks may be waiting for this bucket."""
        for slot in self.slots:
            slot.lent = slot.memory = None
            gradient = slot.parameter.grad
            if gradient is not None and gradient.data_ptr() == slot.address:
                slot.parameter.grad = None
        self._flat.zero_()
        self._flags.copy_(torch.tensor([0.0] * 2 * len(self.slots) + _DISCARDED))
        self._begin()

    def _begin(self) -> None:
        arrays, dtypes = self._arrays, self._dtypes
        compression = self.reduction.compression
        if isinstance(compression, GradientCompressor):
            arrays, dtypes = [array_of(self._flags)], [dtype_of(self._flags)]
            self._exchange, self._needs = self._compressed_exchange(compression), None
        elif not self._as_it_is:
            compressed, context = compression.compress(self._gradients)
            self._compressed = (compressed, context)
            arrays = [array_of(compressed), array_of(self._flags)]
            dtypes = [dtype_of(compressed), dtype_of(self._flags)]
        elif self._borrows:
            arrays = [
                array if slot.lent is None else slot.memory
                for slot, array in zip(self.slots, arrays, strict=False)
            ]
            arrays.append(self._arrays[-1])
        self.handle = submit_allreduce(
            arrays,
            arrays,
            dtypes=dtypes,
            name=self.name,
            op=self.reduction.op,
            prescale=self.reduction.prescale,
            postscale=self.reduction.postscale,
            process_set=self.reduction.process_set,
            resident=self._as_it_is,
        )
        if self._exchange is not None:
            self.advance()
            announce(self)

    def _compressed_exchange(self, compressor: GradientCompressor) -> Iterator[Handle]:
        reduction = self.reduction
        parts = []
        for slot, place, offset in zip(self.slots, self.places, self._offsets, strict=True):
            # data: what the compressor writes is no change that the user has made.
            flat, view = self._flat[offset : offset + place.elements], slot.view.data
            if flat.is_complex():
                flat, view = torch.view_as_real(flat).view(-1), torch.view_as_real(view)
            parts.append(Part(slot.parameter, place.name, flat, view))
        name = f"{self.name}.{type(compressor).__name__}"
        exchange = Exchange(name, reduction.op, reduction.process_set)
        states = yield from compressor.exchange(parts, exchange)
        assert self.handle is not None
        yield self.handle
        self.handle.wait()
        for part, state, used in zip(
            parts, states, self._flags[: len(self.slots)].tolist(), strict=True
        ):
            # Where no rank had a gradient, what is left of earlier ones waits on.
            if used:
                compressor.keep(part, state)

    def advance(self) -> bool:
        """Go on with an exchange of several rounds as far as nothing has to be waited for.

        Whoever waits for something else calls this too, in any thread: another rank may have
        to see the next round before it can go on.

        Returns:
            Whether something is left.
        """
        if not self._advancing.acquire(blocking=False):
            return True
        try:
            while self._exchange is not None:
                if self._needs is not None and not self._needs.done():
                    return True
                self._needs = next(self._exchange, None)
                if self._needs is None:
                    self._exchange = None
        except Exception as error:  # of this bucket, and no business of who waits for others
            self._exchange, self._problem = None, error
        finally:
            self._advancing.release()
        return False

    def end_exchange(self) -> None:
        """Carry an exchange of several rounds through to its end."""
        while self.advance():
            needed = self._needs
            if needed is not None:
                with suppress(Exception):  # which the exchange raises itself
                    needed.wait()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem

    def finish(self) -> list[tuple[Slot, bool]]:
        """Wait for the reduction and put the results where optimizers look for them.

        Returns:
            Parameters for which some rank has a sparse gradient that nobody expected, each
            with whether another rank has a dense one, whose sum is then in `slot.view`.

        Raises:
            DiscardedStepError: another rank has discarded this step or the one before.
        """
        assert self.handle is not None
        self.handle.wait()
        self.end_exchange()
        if self._compressed is not None:
            compressed, context = self._compressed
            self._gradients.copy_(self.reduction.compression.decompress(compressed, context))
            self._compressed = None
        surprises = []
        flags = self._flags.ne(0).tolist()
        discarded, after_discard, kept = flags[-3:]
        if discarded or (after_discard and kept):
            self.rewind()
            raise DiscardedStepError
        count = len(self.slots)
        dense, sparse = flags[:count], flags[count : 2 * count]
        for slot, dense_anywhere, sparse_anywhere in zip(self.slots, dense, sparse, strict=True):
            if sparse_anywhere:
                if slot.lent is not None:
                    slot.view.copy_(slot.lent)
                surprises.append((slot, dense_anywhere))
            elif dense_anywhere and (slot.parameter.grad is not None or not slot.present):
                # Where a gradient was there and is gone, the user has discarded it meanwhile.
                self.deliver(slot)
        self.rewind()
        return surprises

    def deliver(self, slot: Slot) -> None:
        """Make the result the parameter's gradient."""
        view, parameter = slot.view if slot.lent is None else slot.lent, slot.parameter
        if not self._direct:
            parameter.grad = view.to(parameter.device)
        elif parameter.grad is not view:
            parameter.grad = view
