"""The chunked KDA prefill from convolved rows to o: every backend that may run here beside each other.

Every arm starts from dense q, k and v as a convolution leaves them, forget and beta logits, and does norms, gate and
sigmoid itself; states are updated in the pool. No arm is timed that is not within the operation's bounds of the
recurrence in fp64. `parts`: our two kernels alone as well, on memory that one `prepare` filled, each beside the bytes
that it has to move.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F

from anabranch.measure.arms import ArmTimes, Least, held_to, sets_for, time_arms
from anabranch.measure.peers import fla_prompt
from anabranch.ops.kda_prefill import chunked, reference
from anabranch.ops.kda_prefill.chunked import BOUNDED, SOFTPLUS, Config
from anabranch.ops.kda_prefill.spec import CHUNK, KDA_PROMPT, RANDOM_ERRORS, floor
from anabranch.ops.registry import IMPLEMENTATIONS
from anabranch.ops.segments import Segments
from anabranch.ops.spec import Floor

D, CALLS = 128, 4
GATES = {"bounded": -5.0, "softplus": None}
OURS, PEERS = ("cuda", "chunked"), ("fla", "flash")
PEER_ERRORS = (1.5e-2, 1.5e-2)  # a peer rounds where it likes; ours are held to RANDOM_ERRORS
TILE_BYTES = (3 * CHUNK * D + 2 * CHUNK * CHUNK) * 2 + (D + CHUNK) * 4  # what our kernels exchange, a chunk and head
Given = dict[str, Any]
Arm = Callable[[Given], Any]


def bench_kda_prefill(
    device: torch.device,
    cases: Sequence[tuple[int, ...]],
    *,
    gate: str = "bounded",
    only: Sequence[str] = (),
    parts: bool = False,
    chains: Sequence[str] = (),
) -> Iterator[ArmTimes]:
    """Cases of (heads, tokens, segments).

    Args:
        gate: bounded or softplus.
        only: backends instead of all that may run here.
        parts: `prepare` and `chain` of our backends as arms of their own.
        chains: launches of the Triton chain like R64W4S2 (value rows, warps, stages) as arms.

    Raises:
        GateRedError: a backend is outside its bounds.
        ValueError: a gate or backend that is none or cannot run here, a launch or case of another form.
    """
    if gate not in GATES:
        raise ValueError(f"gate={gate!r}: accepted are {', '.join(GATES)}")
    names, launches = backends(device, only, GATES[gate]), {name: launch_of(name) for name in chains}
    for heads, tokens, segments in cases:
        if tokens % segments:
            raise ValueError(f"cases={heads}x{tokens}x{segments}: need tokens that divide into the segments")
    for heads, tokens, segments in cases:
        case = {"heads": heads, "segments": segments, "length": tokens // segments, "gate": gate}
        yield _case(device, case, names, parts, launches)


def backends(device: torch.device, only: Sequence[str], bound: float | None) -> list[str]:
    """Those that may run here, or `only` those; ValueError names one that may not."""
    reasons: dict[str, str] = {}
    for name in (*OURS, *PEERS):
        found = next(i for i in IMPLEMENTATIONS["kda_prefill"] if i.name == name)
        verdict = found.verdict(None, device, deterministic=False)
        if not verdict.ok:
            reasons[name] = verdict.reason
        elif name == "flash" and bound is None:
            reasons[name] = "takes bounded gates only"
    for name in only:
        if name not in (*OURS, *PEERS):
            raise ValueError(f"only={name!r}: accepted are {', '.join((*OURS, *PEERS))}")
        if name in reasons:
            raise ValueError(f"only={name!r}: {reasons[name]}")
    return list(only) or [name for name in (*OURS, *PEERS) if name not in reasons]


def launch_of(name: str) -> Config:
    """From R64W4S2; ValueError for another form."""
    found = re.fullmatch(r"R(64|128)W([48])S([1-9])", name)
    if found is None:
        raise ValueError(
            f"chains={name!r}: accepted is a form like R64W4S2: value rows 64 or 128, warps 4 or 8, stages"
        )
    rows, warps, stages = (int(n) for n in found.groups())
    return Config(rows=rows, chain_warps=warps, stages=stages)


def prompt_rows(device: torch.device, heads: int, segments: Segments, bound: float | None) -> Given:
    """Arguments of kda_prompt."""

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=device).to(dtype)

    tokens, width, count = sum(segments.lengths), heads * D, len(segments)
    return {
        **{name: randn(tokens, heads, D) for name in ("q", "k", "v", "forget")},
        "beta_logits": randn(tokens, heads + -heads % 16)[:, :heads],
        "dt_bias": randn(width, dtype=torch.float32) * 0.5,
        "a_log": randn(heads, dtype=torch.float32) * 0.5,
        "lower_bound": bound,
        "saves": None,
        "segments": segments,
        "slots": torch.arange(count, device=device),
        "state": randn(count, heads, D, D, dtype=torch.float32) * 0.1,
    }


def exact(given: Given) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and final states of the recurrence in fp64."""

    def unit(x: torch.Tensor) -> torch.Tensor:
        return x.double() / (x.double().square().sum(-1, keepdim=True) + 1e-6).sqrt()

    v, state, bound = given["v"].double(), given["state"].double(), given["lower_bound"]
    zeta = given["forget"].double() + given["dt_bias"].double().view(v.shape[1:])
    rate = given["a_log"].double().exp()[:, None]
    g = -rate * F.softplus(zeta) if bound is None else bound * (rate * zeta).sigmoid()
    rows = (unit(given["q"]), unit(given["k"]), v, g, given["beta_logits"].double().sigmoid())
    return reference.kda_prefill(*rows, given["segments"], given["slots"], state), state


def _least(heads: int, segments: int, length: int) -> dict[str, Floor]:
    """What the whole and each of our kernels must move."""
    tokens = segments * length
    exchanged, row = segments * -(-length // CHUNK) * heads * TILE_BYTES, tokens * heads * D * 2
    whole = floor(tokens, heads, segments)
    return {
        "whole": whole,
        "prepare": Floor(bytes=3 * row + exchanged, flops=0),
        "chain": Floor(bytes=whole.bytes - 3 * row + exchanged, flops=whole.flops),
    }


def _case(
    device: torch.device, case: dict[str, Any], names: Sequence[str], parts: bool, launches: dict[str, Config]
) -> ArmTimes:
    heads, count, length = case["heads"], case["segments"], case["length"]
    least = _least(heads, count, length)
    # one object for all sets: fla keeps what it derives from it, which a capture could not compute again
    segments = Segments.of([length] * count, device=device)
    sets = [prompt_rows(device, heads, segments, GATES[case["gate"]]) for _ in range(sets_for(least["whole"].bytes))]
    whole: dict[str, Arm] = {name: _whole(name) for name in names}
    with held_to(f"kda_prefill, {heads} heads, {count} x {length} tokens, {case['gate']}"):
        _check(whole, sets[0])
    arms, of_arm = dict(whole), dict.fromkeys(whole, "whole")
    for name, run, part in _parts(names, parts, launches):
        arms[name], of_arm[name] = run, part
    if len(arms) > len(whole):
        for given in sets:
            given["filled"] = _filled(given, _kernels(next(n for n in OURS if n in names)))
    return time_arms(
        "kda_prefill",
        case,
        arms,
        sets,
        device,
        least={name: Least.of(least[of_arm[name]]) for name in arms},
        equality=KDA_PROMPT.equality.kind,
        calls=CALLS,
    )


def _whole(name: str) -> Arm:
    """One backend from rows to o, as a layer calls it; fla in its best form, which no layer can call."""
    run = fla_prompt if name == "fla" else import_module(f"anabranch.ops.kda_prefill.{name}").kda_prompt
    return lambda given: run(**{key: t for key, t in given.items() if key != "filled"})


def _check(arms: dict[str, Arm], given: Given) -> None:
    want, want_state = exact(given)
    for name, arm in arms.items():
        own = given | {"state": given["state"].clone()}
        bounds = RANDOM_ERRORS if name in OURS else PEER_ERRORS
        pairs = (("output", arm(own), want), ("state", own["state"], want_state))
        for (what, got, exactly), bound in zip(pairs, bounds, strict=True):
            assert got.isfinite().all(), f"{name}: {what} is not finite"
            error = float((got.double() - exactly).norm() / exactly.norm())
            assert error < bound, f"{name}: {what} is off by {error:.1e} of its norm, allowed are {bound:.1e}"


def _kernels(name: str) -> type[chunked.Prefill]:
    return import_module(f"anabranch.ops.kda_prefill.{name}").Prefill


def _parts(names: Sequence[str], parts: bool, launches: dict[str, Config]) -> Iterator[tuple[str, Arm, str]]:
    """Arms of single kernels: name, call, and which floor is theirs."""
    if parts:
        for name in (n for n in OURS if n in names):
            yield f"{name} prepare", partial(_prepare, kernels=_kernels(name)), "prepare"
            yield f"{name} chain", partial(_chain, kernels=_kernels(name)), "chain"
    for name, config in launches.items():
        yield f"chunked chain {name}", partial(_chain, kernels=chunked.Prefill, config=config), "chain"


def _filled(given: Given, kernels: type[chunked.Prefill]) -> chunked.Prefill:
    """A prefill with memory of its own that `prepare` has filled."""
    v = given["v"]
    given["filled"] = kernels(v, torch.empty_like(v), given["segments"], given["slots"], given["state"])
    _prepare(given, kernels)
    return given["filled"]


def _prepare(given: Given, kernels: type[chunked.Prefill]) -> None:
    """The first kernel into the set's own memory."""
    bound, shape = given["lower_bound"], given["v"].shape[1:]
    gate = (SOFTPLUS, 0.0) if bound is None else (BOUNDED, bound)
    q, k, f, b = (given[name] for name in ("q", "k", "forget", "beta_logits"))
    kernels.prepare(given["filled"], q, k, f, b, given["dt_bias"].view(shape), given["a_log"], *gate)


def _chain(given: Given, kernels: type[chunked.Prefill], config: Config | None = None) -> torch.Tensor:
    """The second kernel over the set's own memory."""
    call = given["filled"]
    call.config = config or kernels.choose(len(given["segments"]) * call.heads)
    kernels.chain(call)
    return call.o
