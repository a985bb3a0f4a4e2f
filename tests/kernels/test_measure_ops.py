"""What `anabranch bench` does for single operations, with interpreted kernels on a CPU: gates, arms, rows, floors.

The kernels in CUDA C++ are stood in for by their references, which count their calls; times mean nothing here.
"""

import json
from collections import Counter
from types import SimpleNamespace

import pytest
import torch

from anabranch.cli.bench_ops import lines
from anabranch.measure import (
    arms,
    conv,
    fp8_linear,
    kda_chain,
    kda_decode,
    kda_prefill,
    kda_sections,
    output_gate,
    pack,
)
from anabranch.measure.gate import GateRedError
from anabranch.measure.timing import COPY_BYTES_PER_S, READ_BYTES_PER_S
from anabranch.ops.conv.tile import Tile
from anabranch.ops.fp8_linear import triton as fp8_triton
from anabranch.ops.fp8_linear.tile import parse
from anabranch.ops.kda_prefill import chunked
from anabranch.ops.kda_step.reference import kda_step as reference_step
from anabranch.ops.linear.reference import linear
from anabranch.ops.registry import Implementation, Verdict
from anabranch.ops.skinny_gemm.reference import gemm_low_rank

CPU = torch.device("cpu")
SAMPLES = 2


@pytest.fixture(autouse=True)
def _few_sets(monkeypatch):
    """Two sets instead of 330 MB, single calls, two samples."""
    torch.manual_seed(0)
    monkeypatch.setattr(arms, "ROUNDS", 1)
    monkeypatch.setattr(arms, "SAMPLES", SAMPLES)
    for module in (pack, conv, fp8_linear, kda_decode, kda_prefill):
        monkeypatch.setattr(module, "sets_for", lambda moved: 2)
    monkeypatch.setattr(kda_decode, "LEAST_SETS", 2)
    monkeypatch.setattr(kda_chain, "COLD_BYTES", 0)
    for module in (pack, conv, fp8_linear, kda_decode, kda_chain, kda_prefill, output_gate):
        monkeypatch.setattr(module, "CALLS", 1)


def checked(result, names):
    """Rows with all fields and samples; the lines for people name every arm."""
    rows = [json.loads(json.dumps(row)) for row in result.rows()]
    assert [row["arm"] for row in rows] == names
    for row in rows:
        assert (row["bench"], row["case"]) == (result.bench, dict(result.case))
        assert len(row["us"]) == SAMPLES
        assert row["us_median"] > 0
        assert row["floor_us"] > 0
        assert set(row) == {
            "bench", "case", "arm", "us", "us_median", "floor_us", "gbs", "aa_spread_pct", "equality", "clocks",
        }  # fmt: skip
    text = list(lines(result))
    assert [line.strip().startswith(arm) for line, arm in zip(text[1:], names, strict=True)] == [True] * len(rows)
    return rows


def test_pack():
    [result] = pack.bench_pack(CPU, [(3, 5)])
    rows = checked(result, ["pack", "four copies"])
    width, beta = 3 * 128, 3
    assert rows[0]["floor_us"] == pytest.approx(2 * 5 * (3 * width + beta) * 2 / COPY_BYTES_PER_S * 1e6, abs=5e-4)


def test_conv(monkeypatch):
    for layout in ("rounded", "normed", "grouped"):  # short pieces, as the interpreter pays for every program
        monkeypatch.setitem(conv.ARMS, layout, conv.producer(layout, Tile(streams=4, run=4, warps=1)))
    [result] = conv.bench_conv(CPU, [(1, 6, 2)], ["S2R8W2"])
    arms = ["rounded", "normed", "grouped", "chain", "chain + pack, no norm", "grouped S2R8W2"]
    rows = checked(result, arms)
    floors = {row["arm"]: row["floor_us"] for row in rows}
    assert floors["normed"] > floors["rounded"] == floors["chain"]
    with pytest.raises(ValueError, match="cases=2x7x2: need tokens that divide"):
        next(conv.bench_conv(CPU, [(2, 7, 2)]))
    with pytest.raises(ValueError, match="tile 'S2': accepted is a form like"):
        next(conv.bench_conv(CPU, [(2, 6, 2)], ["S2"]))


@pytest.fixture
def prefill_backends(monkeypatch):
    """The Triton kernels stand in for every backend that may run, and count their calls."""
    calls = Counter()

    def backend(name):
        def counted(**given):
            calls[name] += 1
            return chunked.kda_prompt(**given)

        return SimpleNamespace(kda_prompt=counted, Prefill=chunked.Prefill)

    modules = {f"anabranch.ops.kda_prefill.{name}": backend(name) for name in ("cuda", "chunked", "flash")}
    monkeypatch.setattr(kda_prefill, "import_module", modules.__getitem__)
    monkeypatch.setattr(kda_prefill, "fla_prompt", backend("fla").kda_prompt)
    monkeypatch.setattr(Implementation, "verdict", lambda self, *a, **k: Verdict(self.name != "fla", "it is away"))
    return calls


def test_kda_prefill_has_an_arm_for_every_backend_and_the_floor_of_each_part(prefill_backends):
    [result] = kda_prefill.bench_kda_prefill(CPU, [(1, 9, 1)], parts=True, chains=["R128W8S1"])
    parts = ["cuda prepare", "cuda chain", "chunked prepare", "chunked chain", "chunked chain R128W8S1"]
    rows = {row["arm"]: row for row in checked(result, ["cuda", "chunked", "flash", *parts])}
    assert dict(result.case) == {"heads": 1, "segments": 1, "length": 9, "gate": "bounded"}
    exchanged = (3 * 64 * 128 + 2 * 64 * 64) * 2 + (128 + 64) * 4
    moved = 9 * 3 * 256 + exchanged
    assert rows["cuda prepare"]["floor_us"] == pytest.approx(moved / COPY_BYTES_PER_S * 1e6, abs=5e-4)
    # the gate, a warm-up and the samples; the first arm is timed against itself as well
    assert prefill_backends["chunked"] == 1 + 2 * (1 + SAMPLES)
    assert prefill_backends["cuda"] > prefill_backends["chunked"]


def test_kda_prefill_names_what_it_cannot_time(prefill_backends):
    wrong = {
        "gate='relu': accepted are bounded, softplus": {"gate": "relu"},
        "only='triton': accepted are cuda, chunked, fla, flash": {"only": ["cuda", "triton"]},
        "only='fla': it is away": {"only": ["fla"]},
        "only='flash': takes bounded gates only": {"only": ["flash"], "gate": "softplus"},
        "chains='R32W4S2': accepted is a form like R64W4S2": {"chains": ["R32W4S2"]},
    }
    for message, given in wrong.items():
        with pytest.raises(ValueError, match=message):
            next(kda_prefill.bench_kda_prefill(CPU, [(1, 64, 1)], **given))
    with pytest.raises(ValueError, match="cases=1x65x2: need tokens that divide"):
        next(kda_prefill.bench_kda_prefill(CPU, [(1, 65, 2)]))
    assert not prefill_backends


def test_gate():
    [result] = output_gate.bench_gate(CPU, [(2, 3)])
    assert result.case["row_stride"] == 1536 + 576 + 256
    assert checked(result, ["triton", "torch pair"])[0]["floor_us"] == output_gate.LAUNCH_US


@pytest.fixture
def interpreted_fp8(monkeypatch):
    monkeypatch.setattr(fp8_linear, "_fp8", lambda device: {"triton": fp8_triton.fp8_linear})


def test_fp8_linear_has_the_floor_of_each_format(interpreted_fp8):
    results = list(fp8_linear.bench_shape(CPU, "odd", 200, 256, [1, 3]))
    assert [result.case["m"] for result in results] == [1, 3]
    for m, result in zip((1, 3), results, strict=True):
        plain, coded = checked(result, ["bf16", "fp8 triton"])
        values = m * (200 + 256) * 2
        assert plain["floor_us"] == pytest.approx((200 * 256 * 2 + values) / READ_BYTES_PER_S * 1e6, abs=5e-4)
        assert coded["floor_us"] == pytest.approx((200 * 256 + 4 * 4 + values) / READ_BYTES_PER_S * 1e6, abs=5e-4)
    [result] = fp8_linear.bench_shape(CPU, "odd", 64, 128, [17], [parse(f"T{t}R64K64W4S2P") for t in (16, 64, 128)])
    checked(result, ["bf16", "fp8 triton", "fp8 T16R64K64W4S2P", "fp8 T64R64K64W4S2P"])
    with pytest.raises(ValueError, match="tile 'T16': accepted is a form like"):
        next(fp8_linear.bench_fp8_linear(CPU, ["k3 kda tp8"], [1], ["T16"]))
    with pytest.raises(ValueError, match="shapes='k4': accepted are k3 kda tp8"):
        next(fp8_linear.bench_fp8_linear(CPU, ["k3 kda tp8", "k4"], [1]))


@pytest.fixture
def natives(monkeypatch):
    """References in the place of the CUDA C++ kernels, and how often each was called."""
    calls = Counter()

    def step(*args, plan=None, early=False, **given):
        calls["step", early, plan is not None, "f_b" in given] += 1
        return reference_step(*args, **given)

    def product(name, run):
        def counted(*args):
            calls[name] += 1
            return run(*args)

        return counted

    def low_rank(x, w):
        return product("low_rank", torch.bmm)(x, w.mT)

    plans = SimpleNamespace(variant="f32_one", prefetch=0)
    names = {"f32_one": 0, "f32_two": 1, "bf16_one": 2, "f32_one_fb": 3, "f32_one_many": 4}
    cuda = SimpleNamespace(
        kda_step=step,
        choose=lambda heads, state: plans,
        variants=lambda: names,
        Plan=lambda *args, **kwargs: (args, kwargs),
        Release=kda_decode.cuda.Release,
    )
    for module in (kda_decode, kda_chain):
        monkeypatch.setattr(module, "cuda", cuda)
    monkeypatch.setattr(kda_decode, "low_rank", low_rank)
    monkeypatch.setattr(kda_chain, "linear", product("linear", linear))
    monkeypatch.setattr(kda_chain, "gemm_low_rank", product("both", gemm_low_rank))
    return calls


STEP_ARMS = {
    "step": ["cuda", "cuda, no early reads", "cuda, not chained", "triton", "chain"],
    "f-b": ["f_b inside", "f_b in front", "f_b in front, skinny"],
    "tokens": ["one launch", "a launch each"],
    "bf16": ["cuda", "cuda, no early reads", "cuda, not chained", "triton", "chain"],
}


@pytest.mark.parametrize("section", STEP_ARMS)
def test_sections_of_the_decode_step(section, natives):
    results = list(kda_sections.bench_sections(CPU, [section], [(1, 2)]))
    assert [r.case["tokens"] for r in results] == ([2, 4] if section == "tokens" else [1])
    for result in results:
        checked(result, STEP_ARMS[section])
        state, f_b = result.case["state"], result.case["f_b"]
        assert (state, f_b) == ("bfloat16" if section == "bf16" else "float32", section == "f-b")
    assert natives["step", True, False, section == "f-b"] > SAMPLES
    assert natives["low_rank"] == (2 * (SAMPLES + 1) + 1 if section == "f-b" else 0)


def test_f_b_counts_its_weights(natives):
    with_f_b, without = (kda_decode.Case(heads=3, batch=2, f_b=f_b).floor().bytes for f_b in (True, False))
    assert with_f_b - without == 3 * 128 * 128 * 2


def test_every_variant_of_a_state_dtype(natives):
    [result] = kda_sections.bench_sections(CPU, ["step"], [(1, 2)], variants=True)
    checked(result, ["chosen: f32_one", "f32_one", "f32_one late", "f32_two", "f32_two late"])


def test_the_chain_runs_f_b_in_three_places(natives):
    [result] = kda_chain.bench_kda_chain(CPU, [(2, 3)], hidden=64)
    rows = checked(result, ["f_b in the GEMM", "f_b apart", "f_b in the step", "cublas, triton"])
    assert natives["both"] > SAMPLES
    assert natives["linear"] > 2 * SAMPLES
    assert natives["step", True, False, True] > SAMPLES
    weights = (4 * 256 + 128 + 2 + 14) * 64 * 2
    assert rows[0]["floor_us"] > weights / READ_BYTES_PER_S * 1e6
    with pytest.raises(ValueError, match="cases=2x129: the chain takes at most 128 requests"):
        next(kda_chain.bench_kda_chain(CPU, [(2, 129)]))


def test_a_section_that_is_not_there(natives):
    with pytest.raises(ValueError, match="only='steps': accepted are step, f-b, tokens, bf16, chain"):
        next(kda_sections.bench_sections(CPU, ["step", "steps"]))


def off_by_one(run):
    def wrong(*args, **kwargs):
        out = run(*args, **kwargs)
        first = out[0] if isinstance(out, tuple) else out
        first.view(-1)[0] += 1
        return out

    return wrong


def test_a_red_gate_stops_before_a_time(monkeypatch, natives, interpreted_fp8):
    def never(*args, **kwargs):
        raise AssertionError("timed")

    for module in (pack, conv, output_gate, fp8_linear, kda_decode, kda_chain, kda_prefill):
        monkeypatch.setattr(module, "time_arms", never)
    monkeypatch.setattr(pack.triton, "pack", off_by_one(pack.triton.pack))
    with pytest.raises(GateRedError, match=r"pack, 2 heads, 3 tokens: .* break bitwise"):
        next(pack.bench_pack(CPU, [(2, 3)]))
    monkeypatch.setitem(conv.ARMS, "rounded", off_by_one(conv.ARMS["rounded"]))
    with pytest.raises(GateRedError, match="conv: q: "):
        next(conv.bench_conv(CPU, [(1, 4, 2)]))
    monkeypatch.setattr(output_gate.triton, "sigmoid_gate", off_by_one(output_gate.triton.sigmoid_gate))
    with pytest.raises(GateRedError, match="gate, width 128, 2 tokens"):
        next(output_gate.bench_gate(CPU, [(1, 2)]))
    monkeypatch.setattr(fp8_linear, "_fp8", lambda device: {"triton": off_by_one(fp8_triton.fp8_linear)})
    with pytest.raises(GateRedError, match="fp8_linear odd at M=2: triton: "):
        next(fp8_linear.bench_shape(CPU, "odd", 128, 128, [2]))
    monkeypatch.setattr(kda_decode.triton, "kda_step", off_by_one(kda_decode.triton.kda_step))
    with pytest.raises(GateRedError, match=r"kda_decode, Case\(heads=1, batch=2"):
        next(kda_sections.bench_sections(CPU, ["step"], [(1, 2)]))
    with pytest.raises(GateRedError, match=r"kda_chain, .*: cublas, triton, output: "):
        next(kda_chain.bench_kda_chain(CPU, [(1, 2)], hidden=64))


def test_a_wrong_prefill_is_not_timed(monkeypatch, prefill_backends):
    """One state too early would leave most outputs as they are."""
    monkeypatch.setattr(kda_prefill, "time_arms", lambda *a, **k: pytest.fail("timed"))
    right = chunked.kda_prompt

    def stale(**given):
        return right(**given | {"state": given["state"].clone()})

    monkeypatch.setattr(chunked, "kda_prompt", stale)
    with pytest.raises(GateRedError, match=r"kda_prefill, 1 heads, 1 x 5 tokens, bounded: chunked: state is off by"):
        next(kda_prefill.bench_kda_prefill(CPU, [(1, 5, 1)], only=["chunked"]))
