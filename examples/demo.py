"""The main job in one run: real checkpoint files in, text out, by every legal projection path, and all must agree.

Answers the same prompts by each path in deterministic mode, and compares token ids and log probabilities with the
separate GEMMs. Exits 1 if a bit differs. The Kimi-K3 is the small trained one of checkpoints/small-k3, which also
solves a problem, or without it a tiny random one; the Kimi-Linear is tiny and random, so its text is noise.
"""

import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from anabranch import LLM, FusionConfig, SamplingParams
from anabranch.config.fusion import KDA_PATHS, MLA_PATHS
from anabranch.engine.footprint import footprint
from anabranch.engine.llm import RequestOutput
from anabranch.fusion import counters
from anabranch.models.tiny import init_checkpoint
from anabranch.parallel.layout import Layout

SMALL_K3 = Path(__file__).resolve().parents[1] / "checkpoints" / "small-k3"
QUESTION = (
    "Question: Kate has 4 boxes of 12 eggs. She gives 15 eggs to Leo and then buys 7 more. How many eggs does Kate "
    "have?\nAnswer:"
)
PROMPTS = ["An anabranch leaves the river", "and joins it again further down.", "河", "x"]
GREEDY = SamplingParams(max_tokens=32, temperature=0.0, ignore_eos=True)


@dataclass(frozen=True)
class Run:
    """One arm: which paths, what they answered, what ran, and what it cost."""

    fusion: FusionConfig
    outputs: list[RequestOutput]
    gemms: dict[str, float]
    extra_bytes: int
    tokens_per_s: float


def run(checkpoint: Path, fusion: FusionConfig) -> Run:
    llm = LLM(checkpoint, fusion=fusion, deterministic=True, prefix_cache=False)
    llm.generate(PROMPTS[:1], GREEDY)  # the first call pays for lazy set-up
    with counters.counting() as ran:
        start = time.perf_counter()
        outputs = llm.generate(PROMPTS, GREEDY)
        seconds = time.perf_counter() - start
    for kind in ("kda", "mla"):
        assert ran[f"{kind}.{getattr(fusion, kind)}"] > 0, f"{kind}={getattr(fusion, kind)} did not run"
    return Run(
        fusion=fusion,
        outputs=outputs,
        gemms={k: ran[f"{k}.gemm"] / ran[f"{k}.{getattr(fusion, k)}"] for k in ("kda", "mla")},
        extra_bytes=footprint(llm.model, Layout(), llm.engine.runner.cache.shape.state_dtype).fusion_bytes,
        tokens_per_s=sum(len(o.outputs[0].token_ids) for o in outputs) / seconds,
    )


def difference(a: Run, b: Run) -> tuple[bool, float]:
    """Whether all token ids are equal, and the largest difference of a log probability."""
    pairs = [(x.outputs[0], y.outputs[0]) for x, y in zip(a.outputs, b.outputs, strict=True)]
    same = all(x.token_ids == y.token_ids for x, y in pairs)
    return same, max(abs(p - q) for x, y in pairs for p, q in zip(x.logprobs, y.logprobs, strict=True))


def legal_fusions(checkpoint: Path) -> list[FusionConfig]:
    """Every path that the rules allow for this model, beside the separate one of the other kind; that pair first.

    But for `single`, which merges nothing and is there for adapters.
    """
    plan = LLM(checkpoint).model.plan
    pairs = [(kda, MLA_PATHS[0]) for kda in KDA_PATHS] + [(KDA_PATHS[0], mla) for mla in MLA_PATHS[1:]]
    pairs = [pair for pair in pairs if "single" not in pair]
    return [
        FusionConfig(kda=kda, mla=mla) for kda, mla in pairs if plan.kda.verdicts[kda].ok and plan.mla.verdicts[mla].ok
    ]


def compare(console: Console, name: str, checkpoint: Path) -> bool:
    """Run and print one model's table; True if every arm agrees with the separate one."""
    table = Table(
        title=f"{name}: {len(PROMPTS)} prompts x {GREEDY.max_tokens} tokens, greedy, deterministic, fp32, CPU"
    )
    for heading in (
        "KDA path",
        "MLA path",
        "KDA GEMMs",
        "MLA GEMMs",
        "tokens",
        "logprob diff",
        "extra memory",
        "tok/s",
    ):
        table.add_column(heading, justify="right")
    runs = [run(checkpoint, fusion) for fusion in legal_fusions(checkpoint)]
    agreed = True
    for arm in runs:
        same, worst = difference(runs[0], arm)
        agreed &= same and worst == 0.0 and arm.extra_bytes == 0
        table.add_row(
            arm.fusion.kda,
            arm.fusion.mla,
            f"{arm.gemms['kda']:g}",
            f"{arm.gemms['mla']:g}",
            "reference" if arm is runs[0] else "equal" if same else "DIFFER",
            "" if arm is runs[0] else f"{worst:g}",
            f"{arm.extra_bytes} B",
            f"{arm.tokens_per_s:.0f}",
        )
    console.print(table)
    first = runs[0].outputs[0]
    console.print(f"{first.prompt!r} -> {first.outputs[0].text[:50]!r}\n", markup=False, highlight=False)
    return agreed


def show(console: Console, checkpoint: Path) -> None:
    """Print what the trained model writes: a continuation, and a problem that it solves."""
    llm = LLM(checkpoint)
    llm.generate(PROMPTS[:1], GREEDY)
    asked = SamplingParams(max_tokens=120, temperature=0.0, stop=("\n\n",))
    start = time.perf_counter()
    outputs = llm.generate(["Return a list of ", QUESTION], asked)
    seconds = time.perf_counter() - start
    for output in outputs:
        console.print(f"{output.prompt}[bold]{escape(output.outputs[0].text)}[/bold]\n", highlight=False)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    console.print(f"{tokens / seconds:.0f} tokens/s over these two requests\n", highlight=False)


def main() -> int:
    console = Console(width=100)
    with tempfile.TemporaryDirectory(prefix="anabranch-demo-") as folder:
        agreed = []
        for architecture in ("kl", "k3"):
            checkpoint = Path(folder) / f"tiny-{architecture}"
            if trained := architecture == "k3" and (SMALL_K3 / "model.safetensors").is_file():
                checkpoint = SMALL_K3
            else:
                init_checkpoint(architecture, checkpoint, seed=0)
            agreed.append(compare(console, checkpoint.name, checkpoint))
            if trained:
                show(console, checkpoint)
    console.print(
        "every path gives the same tokens and log probabilities, bit for bit" if all(agreed) else "PATHS DIFFER"
    )
    return 0 if all(agreed) else 1


if __name__ == "__main__":
    sys.exit(main())
