"""Residual add, norm and router in one launch against separate ones, by CUDA-graph replay, arms in turn, weights cold.

A chain of one layer's launches from the output projection to the experts, at the Kimi-Linear shape; four layers take
turns, so that no weights stay in the second-level cache. `without` has neither norm nor router (a choice made before):
what an arm takes above it is the price of both. `--k3` times norm and router alone at the Kimi-K3 shape, eight layers.
A result with other bits than the Triton norm's, or a choice that is not as good as the reference's, is refused.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from common import ROOT, append_row, measured, provenance
from experts import EXPERT_COUNT, INNER, SILU, WIDTH, Layer

from anabranch.config.hf import load_model_config
from anabranch.config.model import MoeConfig
from anabranch.measure.timing import Stopwatch, interleave
from anabranch.ops.expert_ffn.cuda import expert_ffn
from anabranch.ops.linear.skinny import linear
from anabranch.ops.norm.triton import add_rms_norm, rms_norm
from anabranch.ops.router import cuda, reference, triton
from anabranch.ops.router.plan import FEW_TOKENS, scratch_words
from anabranch.ops.router.spec import ROUTER

HEADS, EPS, LAYERS, K3_LAYERS, ROUNDS = 4096, 1e-5, 4, 8, 8  # HEADS: columns of the output projection
TOKENS = (1, 2, 4, 8)
Choice = tuple[torch.Tensor, torch.Tensor]


def weight(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, 0.02)


@dataclass(frozen=True, slots=True)
class Routed:
    """What norm and router read of one layer."""

    gain: torch.Tensor
    router: torch.Tensor
    bias: torch.Tensor
    box: torch.Tensor

    @classmethod
    def random(cls, moe: MoeConfig, width: int, router: torch.Tensor | None = None) -> "Routed":
        box = torch.zeros(scratch_words(moe.experts), dtype=torch.int32, device="cuda")
        own = weight(moe.experts, width) if router is None else router
        return cls(1 + weight(width), own, torch.zeros(moe.experts, device="cuda"), box)


def separate(part: Routed, moe: MoeConfig, x: torch.Tensor, update: torch.Tensor | None, route: Any) -> Any:
    """Norm, then this router."""
    y = add_rms_norm(x, update, part.gain, EPS)[1] if update is not None else rms_norm(x, part.gain, EPS)
    return y, route(y, part.router, part.bias, moe, part.box)


def one(part: Routed, moe: MoeConfig, x: torch.Tensor, update: torch.Tensor | None, chained: bool = True) -> Any:
    own = (part.gain, EPS, part.router, part.bias, moe, part.box)
    _, y, *choice = cuda.norm_route(x, update, *own, chained=chained)
    return y, tuple(choice)


def check(part: Routed, moe: MoeConfig, x: torch.Tensor, update: torch.Tensor | None) -> Choice:
    """The choice, once every way to it agrees."""
    y, want = separate(part, moe, x, update, reference.route)
    for name, (normed, choice) in {
        "one": one(part, moe, x, update),
        "cuda": separate(part, moe, x, update, cuda.route),
        "triton": separate(part, moe, x, update, triton.route),
    }.items():
        assert torch.equal(normed, y), f"{name}: other bits than the Triton norm"
        scores = torch.sigmoid(y.double() @ part.router.double().T)  # no bias here
        apart = (scores.gather(1, choice[1]) - scores.gather(1, want[1])).abs().max().item()
        assert apart < 1e-6, f"{name}: another choice than the reference, {apart} apart"
        ROUTER.equality.check(choice[0], want[0], name)
    return want


def kimi_linear(tokens: int, layers: list[Layer], projections: list[torch.Tensor]) -> dict[str, Callable[[int], Any]]:
    """Arm -> the launches of layer n."""
    moe = load_model_config(ROOT / "tests/data/configs/kimi_linear_48b_config.json").moe
    assert moe is not None
    parts = [Routed.random(moe, WIDTH, layer.router) for layer in layers]
    x, heads = weight(tokens, WIDTH) * 50, weight(tokens, HEADS) * 50
    updates = [linear(heads, p) for p in projections]
    choices = [check(part, moe, x, u) for part, u in zip(parts, updates, strict=True)]

    def run(norm: Callable[..., Any], n: int) -> torch.Tensor:
        y, (weights, chosen) = norm(parts[n], moe, x, linear(heads, projections[n]))
        return expert_ffn(y, weights, chosen, layers[n], SILU, layers[n].shared, linear)

    def without(n: int) -> torch.Tensor:
        return run(lambda part, moe, x, update: (update, choices[n]), n)

    before, routed = partial(separate, route=triton.route), partial(separate, route=cuda.route)
    arms: dict[str, Callable[[int], Any]] = {"triton + triton": partial(run, before)}
    arms |= {"triton + cuda": partial(run, routed), "one": partial(run, one)}
    arms |= {"one, not chained": partial(run, partial(one, chained=False)), "without": without}
    return arms


def kimi_k3(tokens: int) -> dict[str, Callable[[int], Any]]:
    config = load_model_config(ROOT / "tests/data/configs/kimi_k3_config.json")
    moe, width = config.moe, config.hidden_size
    assert moe is not None
    parts, x = [Routed.random(moe, width) for _ in range(K3_LAYERS)], weight(tokens, width) * 50
    for part in parts:
        check(part, moe, x, None)
    return {
        "triton + triton": lambda n: separate(parts[n], moe, x, None, triton.route),
        "triton + cuda": lambda n: separate(parts[n], moe, x, None, cuda.route),
        "one": lambda n: one(parts[n], moe, x, None),
        "without": lambda n: rms_norm(x, parts[n].gain, EPS),
    }


def watch(call: Callable[[int], Any], layers: int) -> Stopwatch:
    def run() -> None:
        for _ in range(ROUNDS):
            for n in range(layers):
                call(n)

    return Stopwatch(run, ROUNDS * layers, torch.device("cuda"), graph=True)


def report(arms: dict[str, Callable[[int], Any]], model: str, tokens: int, layers: int, rounds: int) -> None:
    timed = interleave({name: partial(watch, call, layers) for name, call in arms.items()}, rounds=rounds)
    print(f"{model}, {tokens} tokens, A/A differ by {timed.spread_pct:.2f} %")
    floor = measured(timed.us["without"], 0.0)["us_median"]
    for name in arms:
        row = measured(timed.us[name], 0.0) | {"spread_pct": round(timed.spread_pct, 3)}
        case = {"model": model, "tokens": tokens, "layers_rotated": layers}
        record = {"bench": "route", "case": case, "arm": name, **row, **provenance()}
        append_row(ROOT / "benchmarks/results/route.jsonl", record)
        print(f"  {row['us_median']:8.2f} us  {row['us_median'] - floor:+7.2f}  {name}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS, help=f"up to {FEW_TOKENS}")
    parser.add_argument("--k3", action="store_true", help="norm and router alone at the Kimi-K3 shape")
    parser.add_argument("--rounds", type=int, default=3, help="times that all arms take turns")
    options = parser.parse_args()
    torch.manual_seed(0)
    if options.k3:
        for tokens in options.tokens:
            report(kimi_k3(tokens), "k3", tokens, K3_LAYERS, options.rounds)
        return
    layers, projections = [Layer() for _ in range(LAYERS)], [weight(WIDTH, HEADS) for _ in range(LAYERS)]
    assert (layers[0].count, layers[0].w2.shape[-1]) == (EXPERT_COUNT, INNER)
    for tokens in options.tokens:
        report(kimi_linear(tokens, layers, projections), "kl", tokens, LAYERS, options.rounds)


if __name__ == "__main__":
    main()
