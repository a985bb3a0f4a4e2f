"""A model without layers whose answers depend on every slot and page it is given: wrong memory means a wrong token.

The recurrent state is a running hash of the tokens, each latent row is its token. At every step the hash is computed
again from the rows of the block table and must equal the one in the slot. The convolution's window is the last token.
"""

from itertools import pairwise
from types import SimpleNamespace

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.engine.cache import PAGE, Cache, CacheShape
from anabranch.engine.engine import Engine
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.layers.batch import Batch, KdaState, LatentPages
from anabranch.ops.log_softmax.reference import log_softmax, pick
from anabranch.parallel.collectives import SingleRank

VOCAB, PRIME = 31, 16_777_213  # the largest prime that fp32 counts up to exactly
POISON = 30  # a token whose logits are not finite


def fold(state: int, tokens: list[int]) -> int:
    for token in tokens:
        state = (state * 37 + token + 1) % PRIME
    return state


def answer(prompt: list[int], count: int) -> list[int]:
    """What the toy model answers to `prompt`, computed without any engine."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(fold(0, tokens) % (VOCAB - 1))
    return tokens[len(prompt) :]


class ToyModel:
    """Stands where KimiForCausalLM does: one KDA layer (the hash) and one MLA layer (the rows)."""

    def __init__(self, config: ModelConfig, saves: bool) -> None:
        self.ops = SimpleNamespace(log_softmax=log_softmax, pick=pick, prefill_saves=saves)
        self.config, self.left = config, 0  # states left on the way
        self.model, self.comm = self, SingleRank()

    def expert_load(self) -> dict:
        return {}

    def __call__(self, batch: Batch, caches: list) -> torch.Tensor:
        kda, mla = caches
        assert isinstance(kda, KdaState)
        assert isinstance(mla, LatentPages)
        flat = mla.pages.view(-1, mla.pages.shape[-1])
        flat[batch.rows] = batch.tokens[:, None].float()
        logits = torch.full((len(batch.tokens), VOCAB), -1.0)
        offsets, left = batch.segments.offsets.tolist(), self._left(batch)
        for i, (slot, total) in enumerate(zip(batch.slots.tolist(), batch.segments.totals, strict=True)):
            if slot < 0:  # a row of nobody
                continue
            new = batch.tokens[offsets[i] : offsets[i + 1]].tolist()
            state, last = int(kda.state[slot, 0, 0, 0]), int(kda.conv[slot, 0, 0])
            start, pages = total - len(new), batch.block_table[i, : -(-total // PAGE)]
            seen = mla.pages[pages].flatten(0, 1)[:total, 0].int().tolist()
            assert last == (seen[start - 1] if start else 0), f"slot {slot} does not hold the last token"
            for position, token in enumerate(new):
                state = fold(state, [token])
                if (kept := left.pop(offsets[i] + position, None)) is not None:
                    kda.state[kept], kda.conv[kept] = state, token
                    self.left += 1
                logits[offsets[i] + position, state % (VOCAB - 1)] = 1.0
                if token == POISON:
                    logits[offsets[i] + position] = float("nan")
            kda.state[slot], kda.conv[slot] = state, new[-1]
            assert fold(0, seen) == state, f"slot {slot} does not hold the state of its own pages"
        assert not left, "a state was wanted where no prompt is"
        return logits if batch.wanted is None else logits[batch.wanted]

    def _left(self, batch: Batch) -> dict[int, int]:
        """Token -> the slot that takes the state after it, as both lists of a batch say."""
        if batch.saves is None:
            return {}
        assert self.ops.prefill_saves
        offsets, chunks = batch.prefill.offsets.tolist(), iter(batch.saves.chunks.tolist())
        ends = [min(a, end) for start, end in pairwise(offsets) for a in range(start + PAGE, end + PAGE, PAGE)]
        found = {batch.decodes + end - 1: slot for end, slot in zip(ends, chunks, strict=True) if slot >= 0}
        places = zip(batch.saves.ends.tolist(), batch.saves.slots.tolist(), strict=True)
        assert found == {batch.decodes + end - 1: slot for end, slot in places}
        return found


def toy_runner(
    config: ModelConfig, *, slots: int, pages: int, snapshots: int, samples: bool = True, saves: bool = False
) -> Runner:
    shape = CacheShape(
        kda_layers=1,
        mla_layers=1,
        conv=(1, 1),
        state=(1, 1, 1),
        latent_dim=1,
        dtype=torch.float32,
        state_dtype=torch.float32,
    )
    kinds = SimpleNamespace(layers=2, layer_kinds=("kda", "mla"))
    cache = Cache(kinds, ParallelConfig(), shape, slots=slots, pages=pages, device="cpu", snapshots=snapshots)  # type: ignore[arg-type]
    return Runner(ToyModel(config, saves), cache, VOCAB, samples)  # type: ignore[arg-type]


def toy_engine(
    config: ModelConfig,
    *,
    slots: int,
    pages: int,
    snapshots: int,
    chunk: int = 100,
    ahead: bool = False,
    saves: bool = False,
) -> Engine:
    runner = toy_runner(config, slots=slots, pages=pages, snapshots=snapshots, saves=saves)
    return Engine(runner, (), 4096, chunk, prefix_cache=snapshots > 0, ahead=ahead)


def toy_request(number: int, prompt: list[int], count: int) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=count)
    return Request(id=number, prompt=prompt, params=params, text=TextStream(None))


def check_memory(engine: Engine) -> None:
    """Every slot, page and snapshot has exactly one owner."""
    scheduler, cache = engine.scheduler, engine.runner.cache
    running = scheduler.running
    slots = [r.slot for r in running]
    assert len(set(slots)) == len(slots)
    assert sorted([*slots, *scheduler.slots._free]) == list(range(cache.slots))
    nodes = list(scheduler.prefix._nodes()) if scheduler.prefix else []
    owned = [n.page for n in nodes]
    for r in running:
        shared = r.node.depth // PAGE if r.node else 0
        assert [n.page for n in r.node.path()] == r.pages[:shared] if r.node else shared == 0
        owned += r.pages[shared:]
        assert r.computed <= len(r.pages) * PAGE
    assert sorted([*owned, *scheduler.pages._free]) == list(range(cache.pages))
    if scheduler.prefix:
        kept = [n.snapshot for n in nodes if n.snapshot is not None]
        kept += [saved.slot for r in running for saved in r.saved]
        kept += [r.saving[1] for r in running if r.saving is not None]
        everything = sorted([*kept, *scheduler.prefix.snapshots._free])
        assert everything == list(range(cache.slots, cache.slots + cache.snapshots))
        assert sum(n.refs for n in nodes) == sum(r.node is not None for r in running)
        for leaf in (n for n in nodes if not n.children):
            assert leaf.refs or leaf.snapshot is not None, "a page that no hit can reach was kept"
    for r in scheduler.waiting:
        assert (r.slot, r.pages, r.node, r.computed, r.saving, r.saved) == (-1, [], None, 0, None, [])
