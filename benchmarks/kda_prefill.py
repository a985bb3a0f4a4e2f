"""The chunked KDA prefill from convolved rows to o: our two kernels, each alone, and fla-core's chunk_kda.

Every arm starts from dense q, k and v as a convolution leaves them, forget and beta logits, and does norms, gate and
sigmoid itself; states are updated in the pool. Inputs rotate over more than the L2, graph replay, A/A first. No time
without equality with the reference. `prepare` and `chain` alone work on memory that a whole prefill filled.

    python benchmarks/kda_prefill.py                                   # the documented cases
    python benchmarks/kda_prefill.py --fla                             # beside fla-core; tunes a minute a head count
    python benchmarks/kda_prefill.py --k1-warps 4 8 --k2-rows 64 128 --k2-warps 4 8 --k2-stages 1 2 3 --cases 12x1x16384
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from common import ROOT, append_row, provenance

from anabranch.measure.arms import Least, sets_for, time_arms
from anabranch.ops.kda_prefill import chunked, reference
from anabranch.ops.kda_prefill.chunked import BOUNDED, SOFTPLUS, Config, Prefill
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


def prefill(given: Given, config: Config) -> Prefill:
    return Prefill(given["v"], given["segments"], given["slots"], given["state"], config=config)


def rows(given: Given) -> tuple:
    """What `prepare` reads besides v."""
    bound = given["lower_bound"]
    gate = (SOFTPLUS, 0.0) if bound is None else (BOUNDED, bound)
    return tuple(given[name] for name in ("q", "k", "forget", "beta_logits", "dt_bias", "a_log")) + gate


def ours(given: Given, config: Config) -> torch.Tensor:
    return prefill(given, config).run(*rows(given))


def prepare(given: Given, config: Config) -> None:
    """The first kernel into the set's own memory."""
    call = given["filled"]
    call.config = config
    call.prepare(*rows(given))


def chain(given: Given, config: Config) -> torch.Tensor:
    """The second kernel over the set's own memory."""
    call = given["filled"]
    call.config = config
    return call.chain()


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


def configs(args: argparse.Namespace) -> Iterator[Config]:
    for rows_, warps, stages in product(args.k2_rows, args.k2_warps, args.k2_stages):
        yield Config(prepare_warps=args.k1_warps[0], rows=rows_, chain_warps=warps, stages=stages)


def arms_of(args: argparse.Namespace, least: dict[str, Floor]) -> tuple[dict[str, Arm], dict[str, Floor]]:
    """Arms by name, and the floor of each."""
    first = next(configs(args))
    arms: dict[str, Arm] = {"ours": partial(ours, config=first)}
    floors = {"ours": least["whole"]}
    for warps in args.k1_warps:
        name = f"prepare w{warps}"
        arms[name], floors[name] = partial(prepare, config=replace(first, prepare_warps=warps)), least["prepare"]
    for config in configs(args):
        name = f"chain r{config.rows} w{config.chain_warps} s{config.stages}"
        arms[name], floors[name] = partial(chain, config=config), least["chain"]
    if args.fla:
        arms["fla"], floors["fla"] = fla, least["whole"]
    return arms, floors


def check(arms: dict[str, Arm], given: Given, config: Config) -> set[str]:
    """Raise AssertionError unless every arm that makes o equals the reference; the arms whose bits are the first's."""
    want, same, bits = given | {"state": given["state"].clone()}, set(), None
    expected = reference.kda_prompt(**{name: t for name, t in want.items() if name not in ("filled", "offsets_cpu")})
    for name, arm in arms.items():
        if name.startswith("prepare"):
            arm(given)
            continue
        got = given | {"state": given["state"].clone()}
        if name.startswith("chain"):
            got["filled"] = prefill(got, config)
            got["filled"].run(*rows(got))
            got["state"].copy_(given["state"])
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
    whole, row = floor(tokens, heads, segments), tokens * heads * D * 2
    least = {
        "whole": whole,
        "prepare": Floor(bytes=3 * row + exchanged, flops=0),
        "chain": Floor(bytes=whole.bytes - 3 * row + exchanged, flops=whole.flops),
    }
    arms, floors = arms_of(args, least)
    # one object for all sets: fla keeps what it derives from it, which a capture could not compute again
    parts, on_host = (Segments.of([length] * segments, device=device) for device in (DEVICE, "cpu"))
    sets = [inputs(heads, parts, bound) for _ in range(sets_for(whole.bytes))]
    for given in sets:
        given |= {"filled": prefill(given, CONFIG), "offsets_cpu": on_host.offsets}
        prepare(given, next(configs(args)))
    same = check(arms, sets[0], next(configs(args)))
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
        bits = "" if name.startswith("prepare") or name in same else "  (bits differ from ours)"
        print(f"  {name:18s} {us:9.1f} us  {us / least_us:5.2f}x its floor of {least_us:.0f}{bits}", flush=True)
        append_row(ROOT / "benchmarks/results/kda_prefill.jsonl", measured | where)


CONFIG = chunked.CONFIG


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=list(CASES), metavar="HEADSxSEGMENTSxTOKENS")
    parser.add_argument("--gate", default="bounded", choices=["bounded", "softplus"])
    parser.add_argument("--fla", action="store_true", help="also time fla-core, which first tunes itself")
    parser.add_argument("--k1-warps", nargs="*", type=int, default=[CONFIG.prepare_warps])
    parser.add_argument("--k2-rows", nargs="*", type=int, default=[CONFIG.rows], help="64 or 128")
    parser.add_argument("--k2-warps", nargs="*", type=int, default=[CONFIG.chain_warps])
    parser.add_argument("--k2-stages", nargs="*", type=int, default=[CONFIG.stages])
    args, where = parser.parse_args(), provenance()
    torch.manual_seed(0)
    with torch.inference_mode():
        for case in args.cases:
            bench(case, args, where)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
