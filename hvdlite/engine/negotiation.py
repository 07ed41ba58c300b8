"""Rounds: how the ranks of a process set find out what all of them are ready for.

A round is one non-blocking bitwise-AND all-reduce of a few words: flags, one bit for each
cached response, and digests of the next unnamed requests. Whatever that does not settle goes
to the coordinator (rank 0 of the set) as news, in the same round. All decisions follow from
what every rank has seen, so all ranks take the same ones in the same order.

What a joined rank would have to know about a request is only in the coordinator's answer, so
while any rank has joined everything is news.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..transport.base import Communicator, Operation, Words
from ..transport.types import Array
from .cache import ResponseCache
from .coordinator import Coordinator
from .requests import Announcement, Key, Kind, News, Reply, Response, decode, encode
from .submissions import Entry

__all__ = ["JOIN_KEY", "Negotiator", "Round", "receive"]

JOIN_KEY = "hvdlite.join"
NEWS_TAG, REPLY_TAG = 1, 2
_NARROWEST, _WIDEST = 16, 512
"""Unnamed requests that one round can settle. The window doubles while it is full, since
whoever has submitted so many is likely to do so again, and narrows when it was too wide for
some rounds."""

_TOO_WIDE = 16

_ALL = (1 << 64) - 1
# Flags are phrased so that AND answers the question "does this hold on every rank?".
_NO_NEWS, _STAYS, _DRAINS = 1, 2, 4


@dataclass(slots=True)
class Round:
    """What a round decided."""

    agreed: list[tuple[Response, Entry | None]] = field(default_factory=list)
    """In the same order on every rank; the entry is None on a rank that has joined."""
    join: Entry | None = None
    last_joined: int | None = None
    """Set when every rank has joined: the last one to do so."""
    left: tuple[tuple[int, str], ...] | None = None
    """Set when the process set is closed: who left, and why."""
    cached: int = 0
    """How many of the responses came out of the cache."""
    announcements: tuple[Announcement, ...] = ()


class Negotiator:
    """This rank's side of the rounds of one process set."""

    def __init__(
        self,
        comm: Communicator,
        capacity: int,
        ranks: Sequence[int],
        words: Words | None = None,
    ) -> None:
        self.comm = comm
        self._words = words
        self.cache = ResponseCache(capacity)
        self.pending: dict[Key, Entry] = {}
        """Submitted and not yet agreed on."""
        self.joined: tuple[int, ...] = ()
        self.closed = False
        self.fresh = False
        """Whether this rank knows anything that its last round did not tell."""
        self._coordinator = Coordinator(ranks) if comm.rank == 0 else None
        self._announcements: list[Announcement] = []
        self._is_urgent = False
        """Whether any of them is worth a round of its own."""
        self._leaving: str | None = None
        self._leaving_now = False
        self._joins = False
        """Whether this rank is about to announce that it joins."""
        self._news: list[Key] = []
        self._ready_slots: dict[int, str] = {}
        self._conflicts: dict[int, str] = {}
        self._next = 0
        self._head = 0
        self._window = _NARROWEST
        self._too_wide = 0

    # -- what this rank has to say ------------------------------------------------------

    def add(self, entry: Entry) -> None:
        """Take in a submission; the next round tells the others."""
        if entry.name is None:
            entry.key = self._next
            self._next += 1
        else:
            entry.key = entry.name
        self.pending[entry.key] = entry
        self.fresh = True
        self._classify(entry)

    def leave(self, reason: str, now: bool = False) -> None:
        """Close the set in one of the next rounds.

        Args:
            reason: told to the other ranks.
            now: whether to give up what is pending here, rather than wait for the others to
                submit it too (or to leave as well).
        """
        if self._leaving is None or now:
            self._leaving = reason
            self._leaving_now |= now
            self.fresh = True

    def announce(self, announcement: Announcement, urgent: bool = True) -> None:
        """Tell all ranks something in the next round, this one included.

        Args:
            announcement: see there.
            urgent: whether to begin a round for it.
        """
        self._announcements.append(announcement)
        if urgent:
            self._is_urgent = self.fresh = True

    def replace_cache(self, capacity: int) -> None:
        """Begin with an empty cache (on all ranks after one and the same round)."""
        self._news += [*self._ready_slots.values(), *self._conflicts.values()]
        self.fresh |= bool(self._ready_slots or self._conflicts)
        self._ready_slots.clear()
        self._conflicts.clear()
        self.cache = ResponseCache(capacity)

    def wants_round(self) -> bool:
        """Whether this rank has any business with the others."""
        return not self.closed and (
            bool(self.pending) or self._leaving is not None or self._is_urgent
        )

    def _classify(self, entry: Entry) -> None:
        key, request = entry.key, entry.request
        if isinstance(key, int):
            if self.joined:
                self._news.append(key)
            return
        if request.kind is Kind.JOIN:
            self._joins = True
            return
        cached = None if self.joined else self.cache.find(key)
        if cached is None:
            self._news.append(key)
        elif cached.mine is request or cached.mine == request:
            self._ready_slots[cached.slot] = key
        else:
            self._conflicts[cached.slot] = key

    # -- the round ----------------------------------------------------------------------

    def round(self) -> Operation[Round]:
        """Run one round with the other ranks of the set."""
        self.fresh = False
        words = self._fill()
        pending = None if self._words is None else self._words.iband(words)
        yield self.comm.iband(words) if pending is None else pending
        bits = self._bits_from()
        width = (len(words) - bits) // 2
        responses = self.cache.use(_bits_in(words[bits : bits + width]), self._ready_slots)
        result = Round(cached=len(responses))
        self._read_conflicts(_bits_in(np.invert(words[bits + width :])))
        answer: list[int] = words[:bits].tolist()
        flags = answer[0]
        unsettled = self._read_window(answer, responses)
        closing = not flags & _STAYS or bool(flags & _DRAINS)
        if unsettled or closing or not flags & _NO_NEWS:
            reply = yield from self._exchange(closing)
            self._digest(reply, responses, result)
            if closing:
                self.closed = True
                result.left = reply.left
        result.agreed = [(r, self.pending.pop(r.key, None)) for r in responses]
        if result.last_joined is not None:
            result.join = self.pending.pop(JOIN_KEY)
            self._restart_stream()
        return result

    def _fill(self) -> Array:
        if self._joins:
            # Whatever this rank submitted before has to reach the coordinator before.
            self._stop_shortcuts()
            self._news.append(JOIN_KEY)
            self._joins = False
        width = (self.cache.slots + 63) // 64
        bits = self._bits_from()
        words = np.zeros(bits + 2 * width, dtype=np.uint64)
        no_news = not (self._news or self._conflicts or self._announcements)
        leaves = self._leaving is not None
        stays = not leaves or (bool(self.pending) and not self._leaving_now)
        # What does not fit into this round's window must get its turn before the set closes.
        drains = leaves and (self._leaving_now or self._head + self._window not in self.pending)
        words[0] = no_news * _NO_NEWS | stays * _STAYS | drains * _DRAINS
        if not self.joined and JOIN_KEY not in self.pending:
            self._fill_window(words)
        if width:
            _put_bits(words[bits : bits + width], self._ready_slots)
            _put_bits(words[bits + width :], self._conflicts)
            np.invert(words[bits + width :], out=words[bits + width :])
        return words

    def _bits_from(self) -> int:
        """Return where the bits of the cache begin in the words of a round.

        Before them are the flags; a bit for each place in the window that is taken; the
        digests; and their inverses.
        """
        return 1 + -(-self._window // 64) + 2 * self._window

    def _fill_window(self, words: Array) -> None:
        digests: list[int] = []
        for key in range(self._head, self._head + self._window):
            entry = self.pending.get(key)
            if entry is None:
                break
            digests.append(entry.request.digest)
        if digests:
            count = len(digests)
            first = 1 + -(-self._window // 64)
            whole, rest = divmod(count, 64)
            words[1 : 1 + whole] = _ALL
            if rest:
                words[1 + whole] = (1 << rest) - 1
            own = np.array(digests, dtype=np.uint64)
            words[first : first + count] = own
            first += self._window
            words[first : first + count] = ~own

    def _read_conflicts(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.cache.evict(slot)
            for waiting in (self._ready_slots, self._conflicts):
                if slot in waiting:
                    self._news.append(waiting.pop(slot))

    def _read_window(self, answer: list[int], responses: list[Response]) -> bool:
        """Settle the unnamed requests that are equal everywhere; return whether others remain."""
        window = self._window
        first = 1 + -(-window // 64)
        count = sum(word.bit_count() for word in answer[1:first])
        unsettled = False
        for i in range(count):
            key = self._head + i
            # Both halves are ANDs over the ranks: a bit that is set in neither is a bit in
            # which two ranks differ.
            if answer[first + i] | answer[first + window + i] == _ALL:
                request = self.pending[key].request
                responses.append(Response.of_equal_requests(key, request, self.comm.size))
            else:
                self._news.append(key)
                unsettled = True
        self._head += count
        self._fit_window(count)
        return unsettled

    def _fit_window(self, count: int) -> None:
        """Choose the window of the next round by how much of this one was used everywhere."""
        self._too_wide = self._too_wide + 1 if count * 4 <= self._window else 0
        if count == self._window:
            self._window = min(2 * self._window, _WIDEST)
        elif self._too_wide >= _TOO_WIDE:
            self._window = max(self._window // 2, _NARROWEST)
            self._too_wide = 0

    # -- news ---------------------------------------------------------------------------

    def _exchange(self, closing: bool) -> Operation[Reply]:
        comm = self.comm
        requests = tuple((key, self.pending[key].request) for key in self._news)
        self._news.clear()
        news = News(requests, self._leaving if closing else None, tuple(self._announcements))
        self._announcements.clear()
        self._is_urgent = False
        if self._coordinator is None:
            yield comm.isend(encode(news), 0, NEWS_TAG)
            data = yield from receive(comm, 0, REPLY_TAG)
            reply: Reply = decode(Reply, data)
            return reply
        messages = [news]
        # Most ranks have the same news, and to read them takes most of the coordinator's time.
        known: dict[bytes, News] = {}
        for source in range(1, comm.size):
            data = yield from receive(comm, source, NEWS_TAG)
            text = data.tobytes()
            if text not in known:
                known[text] = decode(News, data)
            messages.append(known[text])
        reply = self._coordinator.digest(messages)
        if comm.size > 1:
            data = encode(reply)
            yield from [comm.isend(data, dest, REPLY_TAG) for dest in range(1, comm.size)]
        return reply

    def _digest(self, reply: Reply, responses: list[Response], result: Round) -> None:
        result.announcements = reply.announcements
        for response in reply.responses:
            responses.append(response)
            if not self.joined and not reply.joined:
                self._remember(response)
        if len(reply.joined) == self.comm.size:
            result.last_joined = reply.joined[-1]
            self.joined = ()
        elif reply.joined != self.joined:
            if not self.joined:
                self._stop_shortcuts()
            self.joined = reply.joined

    def _remember(self, response: Response) -> None:
        if not isinstance(response.key, str) or response.error is not None:
            return
        displaced = self.cache.insert(response, self.pending[response.key].request)
        if displaced is not None:
            # This rank may have been waiting on the bit that is gone.
            for waiting in (self._ready_slots, self._conflicts):
                for slot in [slot for slot, name in waiting.items() if name == displaced]:
                    self._news.append(waiting.pop(slot))
                    self.fresh = True

    def _stop_shortcuts(self) -> None:
        """Make news of everything, now that a rank has joined that could not follow otherwise."""
        unnamed = sorted(k for k in self.pending if isinstance(k, int) and k >= self._head)
        self._news += [*self._ready_slots.values(), *self._conflicts.values()]
        self._news += [key for key in unnamed if key not in self._news]
        self._ready_slots.clear()
        self._conflicts.clear()
        self.fresh = True

    def _restart_stream(self) -> None:
        """Number unnamed requests from zero again: ranks that had joined have skipped some."""
        self._head = self._next = 0
        self._news.clear()
        waiting, self.pending = self.pending, {}
        for entry in waiting.values():
            self.add(entry)


_FEW = 16
"""Up to so many bits, Python is faster than NumPy."""


def _put_bits(words: Array, bits: Collection[int]) -> None:
    """Set bits of words that are zero."""
    if len(bits) > _FEW:
        each = np.zeros(len(words) * 64, dtype=np.uint8)
        each[[*bits]] = 1
        words[...] = np.packbits(each, bitorder="little").view("<u8")
        return
    plain: Any = words
    view = memoryview(plain)
    for bit in bits:
        view[bit // 64] |= 1 << bit % 64


def _bits_in(words: Array) -> list[int]:
    """Return which bits are set."""
    values: list[int] = words.tolist()
    if sum(value.bit_count() for value in values) <= _FEW:
        few = []
        for number, value in enumerate(values):
            while value:
                few.append(64 * number + (value & -value).bit_length() - 1)
                value &= value - 1
        return few
    each = np.unpackbits(words.astype("<u8", copy=False).view(np.uint8), bitorder="little")
    found: list[int] = each.nonzero()[0].tolist()
    return found


class _Probe:
    """Completes when a message is there, so that its receiver knows how large it is."""

    def __init__(self, comm: Communicator, source: int, tag: int) -> None:
        self._comm, self._source, self._tag = comm, source, tag
        self.nbytes: int | None = None

    def Test(self) -> bool:
        if self.nbytes is None:
            self.nbytes = self._comm.probe(self._source, self._tag)
        return self.nbytes is not None


def receive(comm: Communicator, source: int, tag: int) -> Operation[Array]:
    """Receive a message of unknown length."""
    probe = _Probe(comm, source, tag)
    yield probe
    data = np.empty(probe.nbytes or 0, dtype=np.uint8)
    yield comm.irecv(data, source, tag)
    return data
