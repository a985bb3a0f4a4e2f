"""Time to the first token of one prompt in a whole model in process, beside the floor that its arithmetic sets."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from anabranch.config.model import ModelConfig
from anabranch.engine.llm import LLM
from anabranch.layers.experts import Mxfp4Experts, PlainExperts
from anabranch.measure.decode_step import counted
from anabranch.measure.launches import Launches, record
from anabranch.measure.timing import floor_us
from anabranch.measure.whole_model import add_requests


@dataclass(frozen=True, kw_only=True, slots=True)
class PrefillTimes:
    """One prompt length: us of every repeat. `launches` of one prompt, None unless recorded."""

    tokens: int
    us: list[float]
    floor_us: float
    on_gpu: bool
    launches: Launches | None
    counted: Mapping[str, Any]

    def line(self) -> str:
        """For people."""
        us = median(self.us)
        text = f"prefill {self.tokens:6d}: TTFT {us / 1e3:8.1f} ms, {self.tokens / us * 1e6:9.0f} tok/s"
        if self.on_gpu:  # as is the floor
            text += f", {us / self.floor_us:.2f}x floor of {self.floor_us / 1e3:.1f} ms"
        if found := self.launches:
            text += f", {found.count:.0f} launches, GPU busy {found.busy_us / us:.1%}"
        return text

    def lines(self) -> Iterator[str]:
        """With the table of a prompt, if it was recorded."""
        yield self.line()
        if self.launches is not None:
            yield from self.launches.lines()

    def row(self) -> dict[str, Any]:
        """The result row."""
        case = {"tokens": self.tokens}
        row = {"bench": "prefill", "case": case, "us": self.us, "us_median": median(self.us)}
        return row | {"floor_us": self.floor_us, **self.counted}

    def profile_row(self) -> dict[str, Any]:
        """Where a prompt goes, by name."""
        assert self.launches is not None, "nothing was recorded"
        return {"bench": "step_profile", "case": {"prefill": self.tokens}, **self.launches.fields()}


def bench_prefill(
    llm: LLM, tokens_in: int, *, repeats: int = 2, profile: bool = False, rng: random.Random
) -> PrefillTimes:
    """One prompt of random tokens at a time, the first one left out. ValueError: a prompt that cannot fit."""
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: need at least 1")
    first_token(llm, tokens_in, rng)
    us = [first_token(llm, tokens_in, rng) * 1e6 for _ in range(repeats)]
    on_gpu = llm.engine.runner.device.type == "cuda"
    return PrefillTimes(
        tokens=tokens_in,
        us=us,
        floor_us=prompt_floor_us(llm, tokens_in),
        on_gpu=on_gpu,
        launches=record(lambda: first_token(llm, tokens_in, rng)) if profile and on_gpu else None,
        counted=counted(llm),
    )


def first_token(llm: LLM, tokens_in: int, rng: random.Random) -> float:
    """Seconds from arrival to the first token of one request."""
    [request] = add_requests(llm, 1, tokens_in, 1, rng)
    while llm.engine.busy:
        llm.engine.step()
    assert request.first_token is not None
    return request.first_token - request.arrived


def prompt_floor_us(llm: LLM, tokens: int) -> float:
    """The longer of reading all weights once and computing every product that a prompt needs, on an H200 in bf16.

    Products: each weight that a token uses, causal attention, and the delta rule's two of a state a token.
    """
    config = llm.model.config
    weights = sum(p.numel() * p.element_size() for p in llm.model.parameters())
    flops = 2 * tokens * active_parameters(llm) + attention_flops(config, tokens)
    return floor_us(weights, flops)


def active_parameters(llm: LLM) -> float:
    """Parameters that one token is multiplied by: of experts the chosen ones, of the vocabulary's ends none.

    The head works on one token of a prompt.
    """
    config, total = llm.model.config, 0.0
    for module in llm.model.model.modules():
        own = sum(p.numel() for p in module.parameters(recurse=False))
        if isinstance(module, Mxfp4Experts):
            own = module.count * 3 * module.inner * module.width
        if isinstance(module, PlainExperts | Mxfp4Experts):
            assert config.moe is not None
            own = own * config.moe.top_k / module.count
        total += own
    return total - llm.model.model.embed_tokens.weight.numel()


def attention_flops(config: ModelConfig, tokens: int) -> float:
    """Scores and values of half of all pairs in every MLA layer; four products of a state row a token in KDA."""
    mla, kda = config.mla, config.kda
    pairs = tokens * tokens / 2
    attended = config.layer_count("mla") * 2 * pairs * mla.heads * (mla.qk_dim + mla.v_dim)
    return attended + config.layer_count("kda") * 4 * tokens * kda.heads * kda.head_dim**2
