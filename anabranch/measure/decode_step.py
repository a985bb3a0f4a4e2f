"""Time per output token of a whole model in process: beside the floor of what was really read, and where it goes."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from anabranch.engine.llm import LLM
from anabranch.measure.launches import Launches, record
from anabranch.measure.timing import floor_us
from anabranch.measure.touched import Touched, noting_experts, weight_bytes
from anabranch.measure.whole_model import Wave, WaveTimer, add_requests
from anabranch.ops.kda_decode.spec import floor as state_floor

LEAST_OUT = 8  # answers shorter than this have no steady steps
PROFILED, WATCHED = 4, 4  # steps behind the timed ones: recorded, and run eagerly to see the routers' choices


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeTimes:
    """One batch size. `experts`: their format. `waves`: repeats. `launches` of one step, None on a CPU."""

    batch: int
    tokens_in: int
    tokens_out: int
    dtype: str
    experts: str
    waves: list[Wave]
    touched: Touched
    floor_us: float
    launches: Launches | None
    counted: Mapping[str, Any]

    @property
    def busy_share(self) -> float | None:
        """Time in which the GPU ran anything (recorded steps) over the time per token (steps that were not)."""
        return self.launches and self.launches.busy_us / (median(w.tpot_ms for w in self.waves) * 1e3)

    def line(self) -> str:
        """For people."""
        tpot = [wave.tpot_ms for wave in self.waves]
        text = f"decode batch {self.batch:4d}: TPOT {', '.join(f'{ms:.2f}' for ms in tpot)} ms, "
        text += f"{self.touched.experts_mean:.1f} experts a layer"
        if (found := self.launches) is None:  # the floor is a GPU's
            return text
        floor = f"{min(tpot) * 1e3 / self.floor_us:.2f}x floor of {self.floor_us / 1e3:.2f} ms"
        return f"{text}, {floor}, {found.count:.0f} launches, GPU busy {self.busy_share:.1%}"

    def row(self) -> dict[str, Any]:
        """The result row."""
        samples = [s * 1e6 for wave in self.waves for s in wave.seconds]
        case = {"batch": self.batch, "context": self.tokens_in, "out": self.tokens_out, "dtype": self.dtype}
        row = {
            "bench": "decode_step",
            "case": case | {"experts": self.experts},
            "us": [round(s, 2) for s in samples],
            "us_median": round(median(samples), 2),
            "tpot_ms": [wave.tpot_ms for wave in self.waves],
            "request_tpot_ms": [wave.request_tpot_ms for wave in self.waves],
            "floor_us": self.floor_us,
            "experts_touched": self.touched.experts_mean,
        }
        if found := self.launches:
            more = {"kernels_per_step": found.kernels, "copies_per_step": found.copies}
            row |= {**more, "busy_us": round(found.busy_us, 2), "busy_share": self.busy_share}
        return row | dict(self.counted)

    def profile_row(self) -> dict[str, Any]:
        """Where a step goes, by name."""
        assert self.launches is not None, "nothing is recorded on a CPU"
        case = {"batch": self.batch, "context": self.tokens_in}
        return {"bench": "step_profile", "case": case, **self.launches.fields()}


def bench_decode(
    llm: LLM, batch: int, *, tokens_in: int = 1024, tokens_out: int = 128, repeats: int = 2, rng: random.Random
) -> DecodeTimes:
    """`repeats` waves of `batch` random prompts; behind the last one the same batch is recorded and its experts seen.

    Raises:
        ValueError: answers too short to have steady steps, or a request that cannot fit.
    """
    check_lengths(tokens_out, repeats)
    on_gpu = llm.engine.runner.device.type == "cuda"
    waves, more, launches, touched = [], tail(batch, tokens_in, llm.engine.scheduler.prefill_chunk), None, Touched()
    for i in range(repeats):
        last = i == repeats - 1
        requests = add_requests(llm, batch, tokens_in, tokens_out + more * last, rng)
        timer = WaveTimer(llm, requests, tokens_out)
        waves.append(timer.run())
        if last:
            launches = record(partial(timer.steps, PROFILED), PROFILED) if on_gpu else None
            touched = watch(llm, timer)
        timer.end()
    return DecodeTimes(
        batch=batch,
        tokens_in=tokens_in,
        tokens_out=tokens_out,
        dtype=str(llm.model.dtype).removeprefix("torch."),
        experts=llm.model.config.expert_format,
        waves=waves,
        touched=touched,
        floor_us=step_floor_us(llm, batch, tokens_in + tokens_out // 2, touched),
        launches=launches,
        counted=counted(llm),
    )


def check_lengths(tokens_out: int, repeats: int) -> None:
    """ValueError: too short to measure."""
    if tokens_out < LEAST_OUT:
        raise ValueError(f"tokens-out={tokens_out}: need at least {LEAST_OUT} to have steady steps")
    if repeats < 1:
        raise ValueError(f"repeats={repeats}: need at least 1")


def watch(llm: LLM, timer: WaveTimer) -> Touched:
    """The experts of a few steps of a running batch, taken without graphs: a replay asks no router hook."""
    runner = llm.engine.runner
    kept, runner.graphs = runner.graphs, None
    try:
        with noting_experts(llm.model) as touched:
            timer.steps(WATCHED)
    finally:
        runner.graphs = kept
    return touched


def step_floor_us(llm: LLM, batch: int, context: int, touched: Touched) -> float:
    """Least time of a decode step at copy bandwidth: weights that it reads, states in and out, latent rows.

    Of the embedding no more than a row a request is read.
    """
    config, cache = llm.model.config, llm.engine.runner.cache
    embedding = llm.model.model.embed_tokens.weight
    weights = weight_bytes(llm.model, touched) - embedding.numel() * embedding.element_size()
    each = state_floor(batch, config.kda.heads, config.kda.head_dim, cache.shape.state_dtype.itemsize).bytes
    latent = batch * context * cache.shape.bytes_per_token
    return floor_us(weights + config.layer_count("kda") * each + latent)


def counted(llm: LLM) -> dict[str, Any]:
    """What ran, for rows."""
    runner = llm.engine.runner
    return {
        "graph_replays": dict(runner.graph_replays),
        "prompt_replays": dict(runner.prompt_replays),
        "eager_steps": dict(runner.eager_steps),
        "ops": {name: how for name, (how, _) in llm.model.selection.chosen.items()},
    }


def lines(result: DecodeTimes, profile: bool) -> Iterator[str]:
    """One line, with `profile` also the table of a step."""
    yield result.line()
    if profile and result.launches is not None:
        yield from result.launches.lines()


def tail(batch: int, tokens_in: int, prefill_chunk: int) -> int:
    """Tokens that requests are asked for beyond the timed ones: steps that are recorded or watched, and the lead that
    the first prompt of a wave may have over the last."""
    return PROFILED + WATCHED + 3 - (-batch * tokens_in // prefill_chunk)
