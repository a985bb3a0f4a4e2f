"""Decides what is computed next and who owns which memory: admission, page growth, preemption, prefix reuse."""

import time
from collections import deque

from anabranch.engine.cache import PAGE, Cache, FreeList, pages_for
from anabranch.engine.prefix import PrefixCache
from anabranch.engine.request import Request

Segment = tuple[Request, int]


class Scheduler:
    """First come, first served. When pages run out the newest running request is preempted and later recomputed.

    Args:
        cache: the pools; this is the only code that hands out their slots and pages.
        prefill_chunk: most prompt tokens in one step.
        prefix_cache: reuse pages and states of earlier requests.
    """

    def __init__(self, cache: Cache, prefill_chunk: int, prefix_cache: bool = True) -> None:
        if prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={prefill_chunk}: need at least 1")
        self.cache, self.prefill_chunk = cache, prefill_chunk
        self.slots, self.pages = FreeList(range(cache.slots)), FreeList(range(cache.pages))
        snapshots = FreeList(range(cache.slots, cache.slots + cache.snapshots))
        self.prefix = PrefixCache(self.pages, snapshots) if prefix_cache and cache.snapshots else None
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    def schedule(self) -> list[Segment]:
        """(request, token count) for one step: running answers first, then prompt chunks up to `prefill_chunk`."""
        decodes: list[Segment] = []
        for request in list(self.running):
            if request.decoding and request in self.running and self._grow(request, 1):
                decodes.append((request, 1))
        prefills, budget = [], self.prefill_chunk
        for request in list(self.running):
            if not request.decoding and budget and request in self.running:
                budget -= self._prefill(request, budget, prefills)
        while budget and self.waiting and self._admit():
            budget -= self._prefill(self.running[-1], budget, prefills)
        # a preempted request decodes no more, even if it was admitted again just now
        return [segment for segment in decodes if segment[0].decoding] + prefills

    def computed(self, request: Request, count: int) -> None:
        """`count` more tokens of a running request are in the cache; save the state where it can be reused."""
        request.computed += count
        if self.prefix is not None and request.computed % PAGE == 0 and request.params.prompt_logprobs is None:
            self._share(request, self.prefix)

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
        if request.node is not None and self.prefix is not None:
            self.prefix.detach(request.node)
        request.slot, request.pages, request.node, request.computed = -1, [], None, 0

    def _prefill(self, request: Request, budget: int, into: list[Segment]) -> int:
        """Schedule the next chunk of a prompt; returns its tokens, 0 if the request lost its memory instead."""
        count = self._chunk(request, budget)
        if not self._grow(request, count):
            return 0
        into.append((request, count))
        return count

    def _chunk(self, request: Request, budget: int) -> int:
        """Chunks end on page boundaries where they can, and once on the last one, where the state is worth saving."""
        end = min(request.computed + budget, request.prefill_until)
        boundary = end // PAGE * PAGE
        if boundary > request.computed and (end < request.prefill_until or self.prefix is not None):
            end = boundary
        return end - request.computed

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

    def _grow(self, request: Request, count: int) -> bool:
        """Pages for `count` more tokens, from the newest requests if need be; False if `request` lost its own."""
        while len(request.pages) < pages_for(request.computed + count):
            if len(self.pages) or (self.prefix is not None and self.prefix.free_a_page()):
                request.pages.append(self.pages.take())
                continue
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

    def _share(self, request: Request, prefix: PrefixCache) -> None:
        """Hand the full pages of a request to the prefix tree and save its state at the last of them."""
        old, node, tokens = request.node, request.node, request.tokens
        for i in range(old.depth // PAGE if old else 0, request.computed // PAGE):
            node = prefix.extend(node, tuple(tokens[i * PAGE : (i + 1) * PAGE]), request.pages[i])
            if node.page != request.pages[i]:  # another request computed the same page first
                self.pages.give(request.pages[i])
                request.pages[i] = node.page
        assert node is not None
        prefix.attach(node)
        if old is not None:
            prefix.detach(old)
        request.node = node
        if node.snapshot is None and (slot := prefix.take_snapshot_slot()) is not None:
            self.cache.copy(request.slot, slot)
            if self.cache.is_finite(slot):
                prefix.keep(node, slot)
            else:  # never hand a poisoned state on
                prefix.snapshots.give(slot)
