"""Block-FP8 on a GPU: the declared class at real shapes, bits that do not know the batch, graphs that see updates."""

import pytest
import torch
from helpers.checkpoints import official, read, write

from anabranch import LLM, FusionConfig, SamplingParams
from anabranch.config.hf import parse_model_config
from anabranch.fusion import counters
from anabranch.models.tiny import init_checkpoint, tiny_config
from anabranch.ops.fp8_linear import expanded, reference
from anabranch.ops.fp8_linear.reference import quantize
from anabranch.ops.fp8_linear.spec import FP8_LINEAR
from anabranch.ops.fp8_linear.tile import parse
from anabranch.ops.fp8_linear.triton import expand, fp8_linear
from anabranch.ops.spec import BITWISE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
# QKVG, MLA whole, q_b and o_proj of Kimi-K3 at TP8; QKV of Kimi-Linear; a ragged one
SHAPES = [(6144, 7168), (3648, 7168), (2304, 1536), (7168, 1536), (12288, 2304), (301, 200)]
ROWS = (1, 7, 16, 17, 64, 65, 128, 512)
GREEDY = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True, logprobs=2)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def checkpoint(case: str, path, seed: int = 0) -> None:
    """A tiny checkpoint with a shared key of 16, the least that kernels take; `case` is kl, k3, kl-fp8 or k3-fp8."""
    architecture, fp8 = case[:2], case.endswith("fp8")
    init_checkpoint(architecture, path)
    raw = tiny_config(architecture, fp8=fp8)
    raw.get("text_config", raw)["qk_rope_head_dim"] = 16
    write(official(parse_model_config(raw), seed), path, raw)


def weight(rows: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    spread = torch.linspace(0.2, 5, rows, device="cuda")[:, None]
    return quantize(torch.randn(rows, columns, device="cuda") * spread / columns**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_declared_class(rows, columns, dtype, monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", False)
    codes, scale = weight(rows, columns)
    for tokens in ROWS:
        x = torch.randn(tokens, columns + 24, device="cuda").to(dtype)[:, 8 : 8 + columns]
        want = (x.double() @ reference.dequantize(codes, scale).double().T).to(dtype)
        FP8_LINEAR.equality.check(fp8_linear(x, codes, scale), want, f"{tokens} tokens")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_know_the_batch_or_the_merge(dtype):
    codes, scale = weight(6144, 7168)
    x = torch.randn(max(ROWS), 7168, device="cuda").to(dtype)
    whole = fp8_linear(x, codes, scale)
    for tokens in ROWS:
        BITWISE.check(fp8_linear(x[:tokens], codes, scale), whole[:tokens], f"{tokens} tokens")
        BITWISE.check(fp8_linear(x[-tokens:], codes, scale), whole[-tokens:], f"the last {tokens} tokens")
    # q, k, v, g one by one have the bits they have together
    for i in range(4):
        part = fp8_linear(x[:17], codes[1536 * i : 1536 * (i + 1)], scale[12 * i : 12 * (i + 1)])
        BITWISE.check(part, whole[:17, 1536 * i : 1536 * (i + 1)].contiguous(), f"projection {i}")


TILES = (
    *("T16R64K128W4S5P", "T16R64K64W4S8P", "T16R128K128W8S4P", "T32R64K128W4S4P", "T64R64K128W4S3P"),
    *("T64R128K128W8S4P", "T128R128K64W8S4P", "T128R128K64W8S4", "T64R128K128W8S4", "T64R64K128W4S4"),
)


@pytest.mark.parametrize(("rows", "columns"), [(6144, 7168), (12288, 2304), (301, 200)])
def test_no_tile_changes_a_bit(rows, columns):
    codes, scale = weight(rows, columns)
    for tokens in (1, 40, 130):
        x = torch.randn(tokens, columns, device="cuda", dtype=torch.bfloat16)
        want = fp8_linear(x, codes, scale)
        for name in TILES:
            BITWISE.check(fp8_linear(x, codes, scale, parse(name)), want, f"{tokens} tokens, {name}")


@pytest.mark.parametrize(("rows", "columns"), [(6144, 7168), (301, 200)])
def test_many_tokens_over_the_expanded_weight(rows, columns):
    codes, scale = weight(rows, columns)
    BITWISE.check(expand(codes, scale), reference.dequantize(codes, scale).bfloat16())
    for tokens in (1, expanded.FROM - 1, expanded.FROM, 700):
        x = torch.randn(tokens, columns + 24, device="cuda", dtype=torch.bfloat16)[:, 8 : 8 + columns]
        got = expanded.fp8_linear(x, codes, scale)
        want = (x.double() @ reference.dequantize(codes, scale).double().T).bfloat16()
        FP8_LINEAR.equality.check(got, want, f"{tokens} tokens")
        if tokens < expanded.FROM:
            BITWISE.check(got, fp8_linear(x, codes, scale))


@pytest.mark.parametrize("tokens", [8, 300])
@pytest.mark.parametrize("run", [fp8_linear, expanded.fp8_linear], ids=["triton", "expanded"])
def test_graph_replay_reads_new_codes_scales_and_inputs(run, tokens):
    codes, scale = weight(3648, 7168)
    x = torch.randn(tokens, 7168, device="cuda", dtype=torch.bfloat16)
    run(x, codes, scale)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run(x, codes, scale)
    for _ in range(3):
        new_codes, new_scale = weight(3648, 7168)
        codes.copy_(new_codes)
        scale.copy_(new_scale * torch.rand((), device="cuda"))
        x.copy_(torch.randn_like(x))
        graph.replay()
        BITWISE.check(y, run(x, codes, scale))


def test_back_to_back_launches_in_a_graph_wait_for_each_other():
    """Sixteen products, each of the last one's output, launched early: the bits of one at a time."""
    codes, scale = weight(2048, 2048)
    x = torch.randn(8, 2048, device="cuda", dtype=torch.bfloat16)

    def chain(wait: bool) -> torch.Tensor:
        y = x
        for _ in range(16):
            y = fp8_linear(y, codes, scale)
            if wait:
                torch.cuda.synchronize()
        return y

    want = chain(True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(False)
    for _ in range(50):
        y.fill_(float("nan"))
        graph.replay()
        BITWISE.check(y, want)
        BITWISE.check(chain(False), want)


def answers(of: LLM) -> list:
    outputs = of.generate(["graphs replay in-place updates", "x", "another one"], GREEDY)
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


@pytest.mark.parametrize("path", ["split", "overlap", "separate", "single"])
@pytest.mark.parametrize("case", ["kl", "k3", "kl-fp8", "k3-fp8"])
def test_captured_graphs_see_updated_weights(case, path, tmp_path):
    """Check 15: captured once, updated in place, replayed: the bits of a fresh model, without a new capture."""
    for seed, name in enumerate(("old", "new")):
        checkpoint(case, tmp_path / name, seed)
    options = {"fusion": FusionConfig(kda=path), "deterministic": True, "max_seqs": 4, "max_len": 256}
    running, want = LLM(tmp_path / "old", **options), answers(LLM(tmp_path / "new", **options))
    assert answers(running) != want
    graphs = running.engine.runner.graphs
    assert graphs is not None
    captured = dict(graphs._graphs)
    before = sum(running.engine.runner.graph_replays.values())
    running.update_weights(read(tmp_path / "new").items())
    assert answers(running) == want
    assert sum(running.engine.runner.graph_replays.values()) > before
    assert dict(graphs._graphs) == captured


@pytest.mark.parametrize("case", ["kl", "k3"])
def test_coded_models_equal_the_cpu_and_use_the_kernel(case, tmp_path):
    checkpoint(f"{case}-fp8", tmp_path)
    with counters.counting() as ran:
        on_gpu = LLM(tmp_path, dtype="float32", max_seqs=1, max_len=128, eager=True, ops={"kda_prefill": "triton"})
        got = on_gpu.generate(["the same"], GREEDY)[0].outputs[0]
    assert ran["fp8.gemm"] > 0
    assert on_gpu.model.selection.chosen["fp8_linear"][0] == "triton"
    want = LLM(tmp_path, device="cpu", max_seqs=1, max_len=128).generate(["the same"], GREEDY)[0].outputs[0]
    same = sum(a == b for a, b in zip(got.token_ids, want.token_ids, strict=True))
    assert got.logprobs[0] == pytest.approx(want.logprobs[0], abs=2e-2)
    assert same >= 1
    again = LLM(tmp_path, deterministic=True, max_seqs=4, max_len=128)
    alone = again.generate(["the same"], GREEDY)[0].outputs[0]
    crowd = again.generate(["other", "the same", "third"], GREEDY)[1].outputs[0]
    assert (alone.token_ids, alone.logprobs) == (crowd.token_ids, crowd.logprobs)


def test_two_thousand_tokens_with_and_without_the_merged_gate(tmp_path):
    """Check 1: the length at which a public merge of the MLA gate failed, on many prompts, with graphs."""
    checkpoint("k3", tmp_path)
    params = SamplingParams(max_tokens=2048, temperature=0.0, ignore_eos=True)
    prompts = [[(31 * i + j) % 256 for j in range(1 + i % 40)] for i in range(64)]
    found = []
    for mla in ("separate", "merged", "overlap"):
        fusion = FusionConfig(kda="split", mla=mla)
        llm = LLM(tmp_path, fusion=fusion, deterministic=True, max_seqs=64, max_len=2200, dtype="bfloat16")
        found.append([(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in llm.generate(prompts, params)])
        assert llm.engine.runner.graph_replays[64] > 1900
    assert found[0] == found[1] == found[2]


def test_a_thousand_replays_of_an_overlapped_step_stay_the_same():
    """Check 37: side-stream work in a graph neither crashes nor loses its dependency."""
    from helpers.oracle import model_config
    from helpers.ref_tiny import kimi_k3_tiny

    from anabranch.models.kimi import KimiForCausalLM

    config = model_config(kimi_k3_tiny(hidden=64, kda_dim=16, kv_lora=32, nope=16, rope=16, vdim=16))
    model = KimiForCausalLM(config, device="cuda", dtype=torch.bfloat16, fusion=FusionConfig(kda="overlap"))
    prologue = model.model.layers["0"].self_attn.prologue
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, device="cuda") / 8)
    x = torch.randn(4, 64, device="cuda", dtype=torch.bfloat16)
    prologue(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = prologue(x)
    want = prologue(x).forget.clone()
    for i in range(1000):
        out.forget.fill_(float("nan"))
        graph.replay()
        if i % 100 == 99:
            BITWISE.check(out.forget, want, f"replay {i}")


def test_a_long_prompt_fits_beside_a_full_pool(tmp_path):
    """Check 39: what warms up is measured before the cache takes the rest, so 14K prompt tokens cannot run out."""
    checkpoint("k3", tmp_path)
    llm = LLM(tmp_path, max_seqs=8, max_len=4096, prefill_chunk=14_336, memory_fraction=0.5, prefix_cache=False)
    prompts = [[(i + j) % 256 for j in range(1792)] for i in range(8)]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    assert all(len(o.outputs[0].token_ids) == 2 for o in llm.generate(prompts, params))
