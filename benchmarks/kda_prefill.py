"""The chunked KDA prefill from convolved rows to o: our kernels in CUDA and in Triton, each alone, and fla-core's.

Every arm starts from dense q, k and v as a convolution leaves them, forget and beta logits, and does norms, gate and
sigmoid itself; states are updated in the pool. Inputs rotate over more than the L2, graph replay, A/A first. No time
without equality with the reference. `prepare` and `chain` alone work on memory that one prepare filled; the whole
chooses its chain as the engine does. `mixed` is the CUDA prepare with the Triton chain.

    python benchmarks/kda_prefill.py                                   # the documented cases, CUDA and Triton
    python benchmarks/kda_prefill.py --impl mixed --cases 12x1x16384   # the first CUDA kernel alone
    python benchmarks/kda_prefill.py --fla                             # beside fla-core; tunes a minute a head count
    python benchmarks/kda_prefill.py --impl chunked --k1-warps 4 8 --k2-warps 4 8 --k2-stages 1 2 3 --cases 12x1x16384
"""

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import torch
from common import ROOT, append_row, provenance

from anabranch.measure.arms import Least, sets_for, time_arms
from anabranch.ops.kda_prefill import chunked, cuda, reference
from anabranch.ops.kda_prefill.chunked import BOUNDED, SOFTPLUS, Config
from anabranch.ops.kda_prefill.spec import CHUNK, KDA_PROMPT, RANDOM_ERRORS, floor
from anabranch.ops.segments import Segments
from anabranch.ops.spec import Floor

CASES = ("96x1x16384", "32x1x16384", "32x1x8192", "32x1x1024", "12x1x16384", "12x16x1024", "12x1x4096")
D, DEVICE = 128, torch.device("cuda")
TILE_BYTES = (3 * CHUNK * D + 2 * CHUNK * CHUNK) * 2 + (D + CHUNK) * 4  # what the kernels exchange, a chunk and head
Given = dict[str, Any]
Arm = Callable[[Given], Any]


def inputs(heads: int, segments: Segments, bound: float | None) -> Given:
    """Arguments of kda_prompt."""

    def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE).to(dtype)

    tokens, width, count = sum(segments.lengths), heads * D, len(segments)
    q, k, v, forget = (randn(tokens, heads, D) for _ in range(4))
    return {
        "q": q,
        "k": k,
        "v": v,
        "forget": forget,
        "beta_logits": randn(tokens, heads + -heads % 16)[:, :heads],
        "dt_bias": randn(width, dtype=torch.float32) * 0.5,
        "a_log": randn(heads, dtype=torch.float32) * 0.5,
        "lower_bound": bound,
        "saves": None,
        "segments": segments,
        "slots": torch.arange(count, device=DEVICE),
        "state": randn(count, heads, D, D, dtype=torch.float32) * 0.1,
    }


class Mixed(cuda.Prefill):
    """The CUDA prepare and the Triton chain."""

    def chain(self) -> None:
        chunked.Prefill.chain(self)


IMPLEMENTATIONS: dict[str, type[chunked.Prefill]] = {"cuda": cuda.Prefill, "mixed": Mixed, "chunked": chunked.Prefill}
NOT_AN_ARGUMENT = ("filled", "offsets_cpu")


def arguments(given: Given) -> Given:
    return {name: t for name, t in given.items() if name not in NOT_AN_ARGUMENT}


def rows(given: Given) -> tuple:
    """What `prepare` reads besides v."""
    bound, shape = given["lower_bound"], given["v"].shape[1:]
    gate = (SOFTPLUS, 0.0) if bound is None else (BOUNDED, bound)
    names = ("q", "k", "forget", "beta_logits")
    return (*(given[name] for name in names), given["dt_bias"].view(shape), given["a_log"], *gate)


def whole(given: Given, kernels: type[chunked.Prefill]) -> torch.Tensor:
    return chunked.prompt(kernels, **arguments(given))


def filled(given: Given, kernels: type[chunked.Prefill]) -> chunked.Prefill:
    """A prefill with memory of its own that `prepare` has filled."""
    v = given["v"]
    call = kernels(v, torch.empty_like(v), given["segments"], given["slots"], given["state"])
    call.prepare(*rows(given))
    return call


def prepare(given: Given, kernels: type[chunked.Prefill], config: Config) -> None:
    """The first kernel into the set's own memory."""
    call = given["filled"]
    call.config = config
    kernels.prepare(call, *rows(given))


def chain(given: Given, kernels: type[chunked.Prefill], config: Config) -> torch.Tensor:
    """The second kernel over the set's own memory."""
    call = given["filled"]
    call.config = config
    kernels.chain(call)
    return call.o


def fla(given: Given) -> torch.Tensor:
    """fla-core's best form: norms, gate and sigmoid inside, the final states copied to their slots."""
    from fla.ops.kda import chunk_kda  # pyright: ignore[reportMissingImports]

    bound = given["lower_bound"]
    names = {"q": "q", "k": "k", "v": "v", "g": "forget", "beta": "beta_logits"}
    o, final = chunk_kda(
        **{name: given[own].contiguous().unsqueeze(0) for name, own in names.items()},
        A_log=given["a_log"],
        dt_bias=given["dt_bias"],
        initial_state=given["state"][given["slots"]],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=bound is not None,
        lower_bound=bound,
        state_v_first=True,
        cu_seqlens=given["segments"].offsets,
        cu_seqlens_cpu=given["offsets_cpu"],
    )
    given["state"][given["slots"]] = final
    return o[0]


def configs(args: argparse.Namespace, impl: str) -> Iterator[tuple[str, Config]]:
    """Launches of a chain by name; the native one has no warps or stages to choose."""
    for rows_ in args.k2_rows:
        if impl == "cuda":
            yield f"cuda chain r{rows_}", Config(rows=rows_)
            continue
        for warps, stages in product(args.k2_warps or [rows_ // 16], args.k2_stages):
            yield f"triton chain r{rows_} w{warps} s{stages}", Config(rows=rows_, chain_warps=warps, stages=stages)


def arms_of(args: argparse.Namespace, least: dict[str, Floor]) -> tuple[dict[str, Arm], dict[str, Floor]]:
    """Arms by name, and the floor of each."""
    arms: dict[str, Arm] = {impl: partial(whole, kernels=IMPLEMENTATIONS[impl]) for impl in args.impl}
    floors = dict.fromkeys(arms, least["whole"])
    for impl in args.impl:
        kernels = IMPLEMENTATIONS[impl]
        for warps in args.k1_warps:
            name = f"triton prepare w{warps}" if impl == "chunked" else "cuda prepare"
            arms[name] = partial(prepare, kernels=kernels, config=Config(prepare_warps=warps))
            floors[name] = least["prepare"]
        for name, config in configs(args, impl):
            arms[name], floors[name] = partial(chain, kernels=kernels, config=config), least["chain"]
    if args.fla:
        arms["fla"], floors["fla"] = fla, least["whole"]
    return arms, floors


def check(arms: dict[str, Arm], given: Given) -> set[str]:
    """Raise AssertionError unless every arm that makes o equals the reference; the arms whose bits are the first's."""
    want, same, bits = given | {"state": given["state"].clone()}, set(), None
    expected = reference.kda_prompt(**arguments(want))
    for name, arm in arms.items():
        if " prepare" in name:
            continue
        got = given | {"state": given["state"].clone()}
        if " chain" in name:  # over what a CUDA or a Triton kernel prepared, as the arm's own prefill does
            got["filled"] = filled(got, arm.keywords["kernels"])
        o = arm(got)
        KDA_PROMPT.equality.check(o, expected, name)
        error = (got["state"].double() - want["state"].double()).norm() / want["state"].double().norm()
        assert error < RANDOM_ERRORS[1], f"{name}: state differs by {error:.1e}"
        bits = o if bits is None else bits
        same |= {name} if torch.equal(o, bits) else set()
    return same


def bench(case: str, args: argparse.Namespace, where: dict) -> None:
    heads, segments, length = (int(n) for n in case.split("x"))
    bound = {"bounded": -5.0, "softplus": None}[args.gate]
    tokens, exchanged = segments * length, segments * -(-length // CHUNK) * heads * TILE_BYTES
    least_of_all, row = floor(tokens, heads, segments), tokens * heads * D * 2
    least = {
        "whole": least_of_all,
        "prepare": Floor(bytes=3 * row + exchanged, flops=0),
        "chain": Floor(bytes=least_of_all.bytes - 3 * row + exchanged, flops=least_of_all.flops),
    }
    arms, floors = arms_of(args, least)
    # one object for all sets: fla keeps what it derives from it, which a capture could not compute again
    parts, on_host = (Segments.of([length] * segments, device=device) for device in (DEVICE, "cpu"))
    sets = [inputs(heads, parts, bound) for _ in range(sets_for(least_of_all.bytes))]
    for given in sets:
        given |= {"filled": filled(given, IMPLEMENTATIONS[args.impl[0]]), "offsets_cpu": on_host.offsets}
    same = check(arms, sets[0])
    named = {"heads": heads, "segments": segments, "length": length, "gate": args.gate}
    timed = time_arms(
        "kda_prefill",
        named,
        arms,
        sets,
        DEVICE,
        least={name: Least.of(least_) for name, least_ in floors.items()},
        equality=KDA_PROMPT.equality.kind,
        calls=4,
    )
    print(f"{heads} heads, {segments} x {length} tokens, {args.gate}: A/A {timed.timed.spread_pct:.1f} %", flush=True)
    for measured in timed.rows():
        name, us, least_us = measured["arm"], measured["us_median"], measured["floor_us"]
        bits = "" if " prepare" in name or name in same else f"  (bits differ from those of {args.impl[0]})"
        print(f"  {name:22s} {us:9.1f} us  {us / least_us:5.2f}x its floor of {least_us:.0f}{bits}", flush=True)
        append_row(ROOT / "benchmarks/results/kda_prefill.jsonl", measured | where)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), metavar="HEADSxSEGMENTSxTOKENS")
    parser.add_argument("--gate", default="bounded", choices=["bounded", "softplus"])
    parser.add_argument("--impl", nargs="+", default=["cuda", "chunked"], choices=list(IMPLEMENTATIONS))
    parser.add_argument("--fla", action="store_true", help="also time fla-core, which first tunes itself")
    parser.add_argument("--k1-warps", nargs="*", type=int, default=[Config().prepare_warps], help="Triton only")
    parser.add_argument("--k2-rows", nargs="*", type=int, default=[64, 128], choices=[64, 128])
    parser.add_argument("--k2-warps", nargs="*", type=int, help="Triton only; one for 16 rows if left out")
    parser.add_argument("--k2-stages", nargs="*", type=int, default=[Config().stages], help="Triton only")
    args, where = parser.parse_args(), provenance()
    torch.manual_seed(0)
    with torch.inference_mode():
        for case in args.cases:
            bench(case, args, where)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
