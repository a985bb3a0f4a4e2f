"""From options to a runner on one rank: the model, its share of the memory, and its graphs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from anabranch.config.fusion import FusionConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.engine.cache import CacheShape
from anabranch.engine.graphs import DecodeGraphs, graph_ladder
from anabranch.engine.memory import MemoryPlan, make_cache, plan_memory
from anabranch.engine.prompt_graphs import SIZES, PromptGraphs, why_not
from anabranch.engine.runner import Runner
from anabranch.engine.warmup import warm_up
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.load import load_model
from anabranch.parallel.collectives import Collectives

Agree = Callable[[MemoryPlan], tuple[MemoryPlan, int | None]]


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineOptions:
    """Keyword arguments of `LLM`, which explains them; every rank of a job gets the same."""

    dtype: str = "auto"
    device: str = "auto"
    fusion: FusionConfig | None = None
    ops: Mapping[str, str] | None = None
    deterministic: bool = False
    load_format: str = "auto"
    max_seqs: int = 16
    max_len: int = 4096
    prefill_chunk: int = 2048
    prefix_cache: bool = True
    memory_fraction: float = 0.9
    eager: bool = False
    graph_sizes: Sequence[int] | None = None
    state_dtype: str = "float32"
    mla_norm_eps: float | None = None
    lora: str | Path | None = None
    seed: int = 0
    progress: bool = False
    rank_timeout: float = 120.0
    expert_load: bool = False
    ahead: bool | None = None

    def __post_init__(self) -> None:
        for name in ("max_seqs", "max_len", "prefill_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: need at least 1")
        if self.state_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"state_dtype={self.state_dtype!r}: accepted are float32, bfloat16")
        if not self.rank_timeout > 0:
            raise ValueError(f"rank_timeout={self.rank_timeout:g}: need a positive number of seconds")

    def launches_ahead(self, device: torch.device) -> bool:
        """Whether a rank begins a step before the last one is read: as wished, or where the host does not compute."""
        return device.type == "cuda" if self.ahead is None else self.ahead


@dataclass(frozen=True, kw_only=True, slots=True)
class Peers:
    """A rank's place among others, its device, and how all agree on the memory."""

    place: ParallelConfig = field(default_factory=ParallelConfig)
    comm: Collectives | None = None
    device: str | None = None
    agree: Agree | None = None


def build_runner(path: Path, options: EngineOptions, peers: Peers, vocab: int | None) -> tuple[Runner, MemoryPlan, int]:
    """Load this rank's model, warm it up, give the cache what is left, and capture graphs.

    Args:
        vocab: ids below this may be sampled; what the ranks agreed on wins.

    Returns:
        The runner, the memory plan, and the longest prompt plus answer.

    Raises:
        ValueError: as `load_model` and `plan_memory`.
    """
    model = load_model(
        path,
        dtype=options.dtype,
        device=peers.device or options.device,
        fusion=options.fusion,
        parallel=peers.place,
        comm=peers.comm,
        ops=options.ops,
        deterministic=options.deterministic,
        load_format=options.load_format,
        seed=options.seed,
        mla_norm_eps=options.mla_norm_eps,
        lora=options.lora,
        count_experts=options.expert_load,
        progress=options.progress,
    )
    max_len = min(options.max_len, model.config.max_context)
    shape = CacheShape.of(model.config, model.parallel, model.dtype, getattr(torch, options.state_dtype))
    plan = _plan(model, shape, options, max_len)
    if peers.agree is not None:
        plan, vocab = peers.agree(plan)
    runner = Runner(model, make_cache(model, shape, plan), vocab, peers.place.samples)
    if on_cuda(model) and not options.eager:
        sizes = options.graph_sizes or graph_ladder(options.max_seqs)
        runner.graphs = DecodeGraphs(model, runner.cache, runner.device, sizes, max_len, runner.vocab)
        runner.graphs.capture()
        prompts = prompt_sizes(model, options, max_len)
        if prompts:
            runner.prompts = PromptGraphs(model, runner.cache, prompts, max_len, runner.vocab)
            runner.prompts.capture()
    return runner, plan, max_len


def _plan(model: KimiForCausalLM, shape: CacheShape, options: EngineOptions, max_len: int) -> MemoryPlan:
    """Warm everything up, then plan what is left."""
    reserve = 0
    if on_cuda(model):
        chunk = min(options.prefill_chunk, max_len)
        reserve = warm_up(model, shape, prefill_chunk=chunk, max_seqs=options.max_seqs)
        # the activations of captured prompts have memory of their own
        reserve += reserve * max(prompt_sizes(model, options, max_len), default=0) // chunk
    return plan_memory(
        model,
        shape,
        max_seqs=options.max_seqs,
        max_len=max_len,
        memory_fraction=options.memory_fraction,
        prefix_cache=options.prefix_cache,
        reserve=reserve,
    )


def prompt_sizes(model: KimiForCausalLM, options: EngineOptions, max_len: int) -> list[int]:
    """The prompts that are captured, in tokens: those that a step may have, where a model's can be."""
    most = min(options.prefill_chunk, max_len)
    return [] if options.eager else [size for size in SIZES if size <= most and why_not(model, size) is None]


def on_cuda(model: KimiForCausalLM) -> bool:
    """Whether a model's weights live on a GPU."""
    return next(model.parameters()).is_cuda
