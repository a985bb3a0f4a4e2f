"""Decides what is computed next and who owns which memory: admission, page growth, preemption, prefix reuse."""

import time
from collections import deque
from collections.abc import Iterable

from anabranch.engine.cache import PAGE, CachePools, FreeList, pages_for
from anabranch.engine.prefix import PrefixCache, Saved
from anabranch.engine.request import Request

Segment = tuple[Request, int]


class _NoRoomError(Exception):
    """There are no free pages, and nobody may be preempted."""


class Scheduler:
    """First come, first served. When pages run out the newest running request is preempted and later recomputed.

    Args:
        cache: the pools; this is the only code that hands out their slots and pages.
        prefill_chunk: most prompt tokens in one step.
        prefix_cache: reuse pages and states of earlier requests.
        saves: a step can leave a state on its way through a prompt, so that no step need end where one is kept.
    """

    def __init__(self, cache: CachePools, prefill_chunk: int, prefix_cache: bool = True, saves: bool = False) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}: need at least 1")
        self.cache, self.prefill_chunk, self.saves = cache, prefill_chunk, saves
        self.slots, self.pages = FreeList(range(cache.slots)), FreeList(range(cache.pages))
        snapshots = FreeList(range(cache.slots, cache.slots + cache.snapshots))
        self.prefix = PrefixCache(self.pages, snapshots) if prefix_cache and cache.snapshots else None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.away: set[Request] = set()  # wait for a step that other ranks compute, and are not scheduled until then
        self.depth = 1  # steps that other ranks compute at once; running answers are spread over them
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    def schedule(self, ahead: bool = False) -> list[Segment]:
        """(request, token count) for one step: running answers first, then prompt chunks up to `prefill_chunk`.

        Args:
            ahead: a step is in flight. Then nobody is preempted, since a sample of theirs may be on its way: without
                free pages the list is empty, and the caller asks again when nothing flies.
        """
        try:
            return self._segments(ahead)
        except _NoRoomError:
            return []

    def _segments(self, ahead: bool) -> list[Segment]:
        decodes: list[Segment] = []
        most = -(-sum(r.decoding for r in self.running) // self.depth)
        for request in [r for r in self.running if r not in self.away]:
            if not request.decoding or request.ending or request not in self.running or len(decodes) == most:
                continue
            if self._grow(request, 1, ahead):
                decodes.append((request, 1))
        prefills, budget = [], self.prefill_chunk
        for request in [r for r in self.running if r not in self.away]:
            if not request.decoding and budget and request in self.running:
                budget -= self._prefill(request, budget, prefills, ahead)
        while budget and self.waiting and self._admit():
            budget -= self._prefill(self.running[-1], budget, prefills, ahead)
        # a preempted request decodes no more, even if it was admitted again just now
        return [segment for segment in decodes if segment[0].decoding] + prefills

    def reserve(self, segments: Iterable[Segment]) -> None:
        """Snapshot slots for the states that these segments leave at the last page end on their way.

        To be called right before they are launched: what is scheduled may yet be thrown away.
        """
        for request, count in segments:
            depth = (request.computed + count) // PAGE * PAGE
            if self.prefix is None or not self._passes(request) or not 0 < depth - request.computed < count:
                continue
            if (slot := self.prefix.take_snapshot_slot()) is not None:
                request.saving = depth, slot

    def launched(self, request: Request, count: int) -> None:
        """`count` more tokens of a running request will be in the cache; copy the state where it can be reused.

        To be called before another step is launched, which will change the state.
        """
        request.computed += count
        if request.saving is not None:
            (depth, slot), request.saving = request.saving, None
            request.saved.append(Saved(depth, slot, self.cache.finite(slot)))
        if self.prefix is None or request.computed % PAGE or not _keeps(request):
            return
        if (slot := self.prefix.take_snapshot_slot()) is not None:
            self.cache.copy(request.slot, slot)
            request.saved.append(Saved(request.computed, slot, self.cache.finite(slot)))

    def landed(self, request: Request, depth: int) -> None:
        """What was launched up to `depth` tokens has been computed, and those tokens are known: share them."""
        while request.saved and request.saved[0].depth <= depth and self.prefix is not None:
            self._share(request, request.saved.pop(0), self.prefix)

    def release(self, request: Request, poisoned: bool = False) -> None:
        """Free everything that a request holds; a poisoned slot and pages are zeroed before anyone gets them."""
        if request in self.waiting:
            self.waiting.remove(request)
        if request not in self.running:
            return
        self.running.remove(request)
        owned = request.node.depth // PAGE if request.node else 0
        if poisoned:
            self.cache.clear(request.slot, request.pages[owned:])
        self.slots.give(request.slot)
        for page in request.pages[owned:]:
            self.pages.give(page)
        if self.prefix is not None:
            unused = [] if request.saving is None else [request.saving[1]]
            for slot in (*unused, *(saved.slot for saved in request.saved)):
                self.prefix.snapshots.give(slot)
            request.saving = None
            request.saved.clear()
            if request.node is not None:
                self.prefix.detach(request.node)
        request.slot, request.pages, request.node, request.computed = -1, [], None, 0

    def _prefill(self, request: Request, budget: int, into: list[Segment], ahead: bool) -> int:
        """Schedule the next chunk of a prompt; returns its tokens, 0 if the request lost its memory instead."""
        count = self._chunk(request, budget)
        if not self._grow(request, count, ahead):
            return 0
        into.append((request, count))
        return count

    def _chunk(self, request: Request, budget: int) -> int:
        """Chunks end on page boundaries where they can, and once on the last one, where the state is worth saving.

        If a step can save it on its way, the last chunk goes to the end.
        """
        end = min(request.computed + budget, request.prefill_until)
        boundary = end // PAGE * PAGE
        stops = self.prefix is not None and _keeps(request) and not self._passes(request)
        if boundary > request.computed and (end < request.prefill_until or stops):
            end = boundary
        return end - request.computed

    def _passes(self, request: Request) -> bool:
        """Whether a step saves a state on its way: after whole chunks from where it starts, which must be page ends."""
        return self.saves and request.computed % PAGE == 0 and _keeps(request)

    def _admit(self) -> bool:
        """Move the first waiting request to the running ones if a slot and the pages for its tokens can be had."""
        request = self.waiting[0]
        if not len(self.slots):
            return False
        hit = None
        if self.prefix is not None and request.params.prompt_logprobs is None:
            hit = self.prefix.match(request.tokens, request.known - 1)
        if hit is not None and self.prefix is not None:
            self.prefix.attach(hit)
        need = pages_for(request.known) - (hit.depth // PAGE if hit else 0)
        if need > len(self.pages) and need > len(self.pages) + (self.prefix.evictable() if self.prefix else 0):
            if hit is not None and self.prefix is not None:
                self.prefix.detach(hit)
            return False
        self.waiting.popleft()
        request.slot, request.node, request.prefill_until = self.slots.take(), hit, request.known
        if hit is None:
            self.cache.clear(request.slot)
        else:
            assert hit.snapshot is not None
            self.cache.copy(hit.snapshot, request.slot)
            request.pages, request.computed = [n.page for n in hit.path()], hit.depth
        self._count_admission(request)
        self.running.append(request)
        return True

    def _count_admission(self, request: Request) -> None:
        if not request.preemptions:
            request.admitted, request.cached_tokens = time.perf_counter(), request.computed
            self.prefix_queries += len(request.prompt)
            self.prefix_hits += request.computed

    def _grow(self, request: Request, count: int, ahead: bool) -> bool:
        """Pages for `count` more tokens, from the newest requests if need be; False if `request` lost its own."""
        while len(request.pages) < pages_for(request.computed + count):
            if len(self.pages) or (self.prefix is not None and self.prefix.free_a_page()):
                request.pages.append(self.pages.take())
                continue
            if ahead:
                raise _NoRoomError
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        return True

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue; what it has computed is computed again, or found in the prefix cache."""
        self.release(request)
        self.waiting.appendleft(request)
        self.preemptions += 1
        request.preemptions += 1
        if not request.sampled:
            request.prompt_logprobs.clear()

    def _share(self, request: Request, saved: Saved, prefix: PrefixCache) -> None:
        """Hand the full pages of a request to the prefix tree, and the copy of its state at the end of them."""
        old, node, tokens = request.node, request.node, request.tokens
        for i in range(old.depth // PAGE if old else 0, saved.depth // PAGE):
            node = prefix.extend(node, tuple(tokens[i * PAGE : (i + 1) * PAGE]), request.pages[i])
            if node.page != request.pages[i]:  # another request computed the same page first
                self.pages.give(request.pages[i])
                request.pages[i] = node.page
        assert node is not None
        prefix.attach(node)
        if old is not None:
            prefix.detach(old)
        request.node = node
        if node.snapshot is None and bool(saved.finite):  # never hand a poisoned state on
            prefix.keep(node, saved.slot)
        else:
            prefix.snapshots.give(saved.slot)


def _keeps(request: Request) -> bool:
    """Whether states of this request are worth saving: one whose prompt is scored is never reused."""
    return request.params.prompt_logprobs is None
