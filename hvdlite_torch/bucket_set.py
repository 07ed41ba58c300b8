"""All buckets of one optimizer, and its sparse gradients, which no bucket can hold."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch

from hvdlite import Handle

from .buckets import Bucket, DiscardedStepError
from .compression import NoneCompressor
from .compressors import GradientCompressor
from .layout import Reduction, distribute
from .names import Label
from .plan import agree_on_kinds, agreed_places, propose_places
from .slots import Slot
from .sparse import SparsePart, exchange_sparse

__all__ = ["BucketSet"]

# What a rank says about its step with its sparse gradients, as the last flags of buckets do.
_KEPT, _DISCARDED, _AFTER_DISCARD = range(3)


class BucketSet:
    """Assigns parameters to buckets and reduces what they hold.

    Args:
        label: identifies the optimizer across ranks.
        groups: numbers of the explicit groups of parameters.
        reduction: how to combine gradients.
        bucket_bytes: size of a bucket, and of the first one.
    """

    def __init__(
        self, label: Label, groups: Any, reduction: Reduction, bucket_bytes: tuple[int, int]
    ) -> None:
        self.label = label
        self.groups = groups
        self.bucket_bytes = bucket_bytes
        self._reduction = reduction
        self._buckets: list[Bucket] = []
        self._sparse: list[Slot] = []
        self._newcomers: list[Slot] = []
        self._sparse_handle: Handle | None = None
        self._proposed: tuple[list[Slot], Handle] | None = None
        self._after_discard = False
        # Never used twice: after an error the engine may still hold buckets of the old names.
        self._serial = itertools.count()

    @property
    def is_agreeing(self) -> bool:
        """Whether an agreement is under way."""
        return self._proposed is not None

    def propose(self, slots: Sequence[Slot]) -> None:
        """Begin to agree with the other ranks on places for parameters that have none yet.

        Args:
            slots: in the order in which their gradients were seen here.
        """
        handle = propose_places(slots, self.groups, f"{self.label}.plan", self._reduction)
        self._proposed = (list(slots), handle)

    def agree(self) -> list[Bucket]:
        """Wait for the agreement and return the new buckets.

        Raises:
            MismatchError: names, shapes or types of parameters differ (on every rank).
        """
        assert self._proposed is not None
        slots, handle = self._proposed
        agreed = agreed_places(slots, handle.wait())
        self._proposed = None
        by_name = {place.name: slot for slot, place in agreed}
        # What is known may be under way already, without those that join in this step.
        joined = self._newcomers if self._sparse else self._sparse
        joined += [slot for slot, _ in agreed if slot.sparse_dim]
        dense = [place for slot, place in agreed if not slot.sparse_dim]
        made = []
        for places in distribute(dense, *self.bucket_bytes):
            name = f"{self.label}.bucket.{next(self._serial)}"
            members = [by_name[place.name] for place in places]
            made.append(Bucket(name, members, places, self._reduction))
        self._buckets += made
        return made

    def agree_if_ready(self) -> list[Bucket]:
        """Return the new buckets if nothing has to be waited for; leave errors to `agree`."""
        if self._proposed is not None and self._proposed[1].done():
            with suppress(Exception):
                return self.agree()
        return []

    def submit(self, bucket: Bucket) -> None:
        """Begin the reduction of one bucket, with what is there."""
        bucket.submit(self._after_discard)

    @property
    def has_sent_sparse(self) -> bool:
        """Whether this step's sparse gradients are under way."""
        return self._sparse_handle is not None

    def submit_sparse_if_complete(self, passes: int) -> None:
        """Begin the reduction of the sparse gradients once all of them have come.

        Args:
            passes: how often each has to come.
        """
        expected = [slot for slot in self._sparse if slot.parameter.requires_grad]
        # Nobody knows which piece of a gradient is the last one before backward ends.
        if expected and not any(slot.recurs or slot.passes < passes for slot in expected):
            self._submit_sparse()

    def _submit_sparse(self, discard: bool = False) -> None:
        if self._sparse and self._sparse_handle is None:
            note = _DISCARDED if discard else _AFTER_DISCARD if self._after_discard else _KEPT
            self._sparse_handle = self._exchange(self._sparse, "sparse", note)

    def reduce(self) -> None:
        """Complete all buckets with what is there, and wait until everything is reduced."""
        for bucket in self._buckets:
            if bucket.handle is None:
                self.submit(bucket)
        self._submit_sparse()
        newcomers = self._exchange(self._newcomers, "newcomers") if self._newcomers else None
        for bucket in self._buckets:
            bucket.advance()
        surprises: list[tuple[Slot, bool]] = []
        problem: DiscardedStepError | None = None
        for bucket in self._buckets:
            try:
                surprises += bucket.finish()
            except DiscardedStepError as error:  # of which all ranks that step know
                problem = error
        handle, self._sparse_handle = self._sparse_handle, None
        totals: list[torch.Tensor | None] = []
        if handle is not None:
            sums, notes = handle.wait()
            totals += sums
            if _DISCARDED in notes or (_AFTER_DISCARD in notes and _KEPT in notes):
                problem = DiscardedStepError()
        self._after_discard = problem is not None
        if problem is not None:
            raise problem
        if newcomers is not None:
            totals += newcomers.wait().totals
            self._sparse += self._newcomers
            self._newcomers = []
        for slot, total in zip(self._sparse, totals, strict=True):
            slot.parameter.grad = total
        if surprises:
            self._reduce_surprises(surprises)

    def _reduce_surprises(self, surprises: Sequence[tuple[Slot, bool]]) -> None:
        """Reduce gradients that turned out to be sparse, here or elsewhere, in this step."""
        slots = [slot for slot, _ in surprises]
        # What is dense here is in the bucket already, and must not be sent a second time.
        for slot in slots:
            if not slot.holds_sparse:
                slot.parameter.grad = None
        name = f"{self.label}.surprise"
        agree_on_kinds(slots, f"{name}.kinds", self._reduction.process_set)
        totals = self._exchange(slots, "surprise").wait().totals
        for (slot, dense_too), total in zip(surprises, totals, strict=True):
            # From now on outside the bucket, where the place stays empty.
            slot.parameter.grad = slot.view.to(total.device) + total if dense_too else total
        self._sparse += slots

    def discard(self) -> None:
        """Reduce the rest of a step that all ranks discard, so that none waits for another."""
        if not self._buckets and not self._sparse:
            return
        for bucket in self._buckets:
            if bucket.handle is None:
                bucket.discard()
        self._submit_sparse(discard=True)
        for bucket in self._buckets:
            assert bucket.handle is not None
            bucket.handle.wait()
            bucket.end_exchange()
            bucket.rewind()
        handle, self._sparse_handle = self._sparse_handle, None
        if handle is not None:
            handle.wait()
        # Who has submitted everything before cannot say so any more in this step.
        self._after_discard = True

    def _exchange(self, slots: Sequence[Slot], what: str, note: int = _KEPT) -> Handle:
        parts = []
        for slot in slots:
            gradient = None if note == _DISCARDED else slot.parameter.grad
            if gradient is not None and gradient.layout is not torch.sparse_coo:
                gradient = gradient.to_sparse(slot.sparse_dim)
            parts.append(SparsePart(gradient, slot.parameter, slot.sparse_dim))
        reduction = self._reduction
        compression = reduction.compression
        if isinstance(compression, GradientCompressor):
            compression = NoneCompressor  # sparse gradients are small as they are
        return exchange_sparse(
            parts,
            f"{self.label}.{what}",
            reduction.op,
            reduction.process_set,
            compression,
            note,
        )

    def drain(self) -> None:
        """Wait for what is under way, whatever becomes of it."""
        for handle in [self._sparse_handle, *(bucket.handle for bucket in self._buckets)]:
            if handle is not None:
                with suppress(Exception):
                    handle.wait()

    def forget(self) -> None:
        """Give up all buckets, which may still be in the hands of the engine."""
        for slot in itertools.chain(
            self._sparse, self._newcomers, *(bucket.slots for bucket in self._buckets)
        ):
            slot.bucket = slot.view = None
            slot.address = slot.sparse_dim = 0
        self._buckets, self._sparse, self._newcomers = [], [], []
        self._sparse_handle = None
        self._proposed = None
        self._after_discard = False
