"""The balanced decode step and cuDNN prefill on a real GPU: references, early launches, graphs, launch counts."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from torch.profiler import ProfilerActivity, profile

from anabranch.config.hf import load_model_config
from anabranch.layers.batch import Batch, KdaState, LatentPages
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.gate.triton import sigmoid_gate
from anabranch.ops.kda_gate import reference as gate_reference
from anabranch.ops.kda_gate.spec import KDA_GATE
from anabranch.ops.kda_gate.triton import log_decay
from anabranch.ops.linear.skinny import linear
from anabranch.ops.mla import attend, balanced, cudnn, reference, sdpa
from anabranch.ops.mla import triton as fixed
from anabranch.ops.mla.spec import MLA_PREFILL, MLA_STEP, MLA_WRITE
from anabranch.ops.norm.triton import rms_norm
from anabranch.ops.segments import Segments

HEADS = pytest.mark.parametrize("heads", [12, 32, 96])
NOPE, ROPE, V, RANK, PAGE = 128, 64, 128, 512, 64
MIXES = [[1], [1024], [33_000], [1, 64, 0, 4097, 513], [1000, 65] * 4, [1088] * 32, [30_000] + [40] * 127]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


class Case:
    """Requests of the given totals over poisoned pages; the newest row of each is not written yet."""

    def __init__(self, totals: list[int], heads: int) -> None:
        width, queries = max(576, -(-max(totals) // PAGE)), heads * (NOPE + ROPE)
        self.totals, self.weight = torch.tensor(totals, device="cuda"), randn(RANK)
        self.wide = randn(len(totals), queries + RANK + ROPE + 64)
        used = [-(-t // PAGE) for t in totals]
        order = torch.randperm(sum(used) + 3, device="cuda")
        self.table = torch.zeros(len(totals), width, dtype=torch.int64, device="cuda")
        self.pages = randn(len(order) + 1, PAGE, RANK + ROPE) * 0.5
        self.pages[-1] = torch.nan
        self.rows = torch.full((len(totals),), -1, device="cuda")
        for i, (total, count) in enumerate(zip(totals, used, strict=True)):
            self.table[i, :count], order = order[:count], order[count:]
            if total:
                self.pages[self.table[i, count - 1], (total - 1) % PAGE :] = torch.nan
                self.rows[i] = self.table[i, count - 1] * PAGE + (total - 1) % PAGE
        self.kv_b, self.heads = randn(heads, NOPE + V, RANK) * RANK**-0.5, heads
        self.gate = randn(len(totals), heads * V + 64)[:, 64:]

    def run(self, step, wide=None, pages=None, gated=False, **options) -> torch.Tensor:
        wide, queries = self.wide if wide is None else wide, self.heads * (NOPE + ROPE)
        q, kv = wide[:, :queries].unflatten(1, (self.heads, NOPE + ROPE)), wide[:, queries : queries + RANK + ROPE]
        places = (self.rows, self.totals, self.table, self.pages.clone() if pages is None else pages, self.kv_b)
        return step(q, kv, self.weight, 1e-5, *places, (lambda: self.gate) if gated else None, **options)


@HEADS
@pytest.mark.parametrize("totals", MIXES, ids=lambda t: f"{len(t)}x{max(t)}")
def test_step_equals_the_chain(heads, totals):
    if heads == 96 and len(totals) > 32:
        pytest.skip("the reference takes long")
    case = Case(totals, heads)
    pages, want_pages = case.pages.clone(), case.pages.clone()
    got = case.run(balanced.mla_step, pages=pages, gated=heads == 12)
    want = case.run(reference.mla_step, pages=want_pages, gated=heads == 12)
    MLA_STEP.equality.check(got, want)
    MLA_WRITE.equality.check(pages[:-1], want_pages[:-1], "pages")
    assert not got[case.totals == 0].any()


@pytest.mark.parametrize("totals", [[1024], [1000, 65] * 4, [700] * 64])
def test_launch_constants_do_not_change_the_answer(totals):
    case = Case(totals, 32)
    want = case.run(reference.mla_step)
    for rows, programs, least, part in (
        (16, 7, 1, 64),
        (64, 132, 1, 512),
        (32, 264, 3, 128),
        (64, 1, 1, 256),
        (32, 50, 2, 128),
        (64, 132, 1, 64),
    ):
        tiles = balanced.Tiles(rows=rows, programs=programs, least=least, slice=part)
        MLA_STEP.equality.check(case.run(balanced.mla_step, tiles=tiles), want)


@pytest.mark.parametrize(
    "totals", [[1], [1024], [1, 64, 0, 4097, 513], [1000, 65] * 4, [700] * 40], ids=lambda t: f"{len(t)}x{max(t)}"
)
@pytest.mark.parametrize("early", [False, True])
def test_any_shares_of_the_cuda_kernels_keep_to_the_reference(totals, early):
    assert attend.available()
    for heads in (12, 32):
        case = Case(totals, heads)
        want = case.run(reference.mla_step)
        for programs, least, columns in ((132, 1, 0), (132, 4, 32), (7, 1, 32), (264, 3, 0)):
            tiles = balanced.Tiles(programs=programs, least=least, columns=columns, cuda=True)
            got = case.run(balanced.mla_step, tiles=tiles, early=early)
            MLA_STEP.equality.check(got, want, f"{tiles}")
            gated = case.run(balanced.mla_step, gated=True, tiles=tiles, early=early)
            assert torch.equal(gated, sigmoid_gate(got, case.gate)), f"{tiles}"


def test_the_plan_is_cuda_where_the_kernel_fits():
    case = Case([70, 1], 32)
    q = case.wide[:, : 32 * (NOPE + ROPE)].unflatten(1, (32, NOPE + ROPE))
    assert balanced.plan(q, case.pages, case.kv_b).cuda
    assert not balanced.plan(q.float(), case.pages, case.kv_b).cuda


def test_a_replay_follows_lengths_that_grow():
    """The grid is that of the capture; lengths, rows and pages are read by the kernels."""
    case = Case([3000, 900, 2000], 32)
    case.pages = torch.nan_to_num(case.pages, nan=0.25)
    ends, totals = case.totals.clone(), case.totals
    pages = case.pages.clone()
    case.run(balanced.mla_step, pages=pages)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = case.run(balanced.mla_step, pages=pages)
    for back in (2990, 899, 640, 1, 0):
        totals.copy_((ends - back).clamp(min=1))
        last = (totals - 1) // PAGE
        case.rows.copy_(case.table.gather(1, last[:, None])[:, 0] * PAGE + (totals - 1) % PAGE)
        want = case.run(reference.mla_step, pages=pages.clone())
        graph.replay()
        MLA_STEP.equality.check(got, want, f"{back} back")


@pytest.mark.parametrize("cuda", [False, True])
@pytest.mark.parametrize("requests", [1, 8, 32])
def test_early_launches_change_no_bit_behind_norm_and_projection(requests, cuda, monkeypatch):
    """norm, GEMM, step, GEMM, as a model runs them: a read before its time would show in one of many replays."""
    tiles = balanced.choose_tiles(requests, 32, PAGE, cuda)
    case = Case([1000 + i for i in range(requests)], 32)
    width, x = case.wide.shape[1], randn(requests, 2304)
    into, out = randn(width, 2304) * 2304**-0.5, randn(2304, 32 * V) * 4096**-0.5
    weight = randn(2304)

    def layer(x: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            wide = linear(rms_norm(x, weight, 1e-5), into)
            x = linear(case.run(balanced.mla_step, wide, pages, tiles=tiles, early=True), out)
        return x

    live, plain = case.pages.clone(), case.pages.clone()
    layer(x, live.clone())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(x, live)
    monkeypatch.setattr(balanced, "early_launch", lambda wanted=True: {"EARLY": False})
    for _ in range(30):
        x.copy_(x.roll(1, 1) * 0.99)
        graph.replay()
        want = layer(x, plain)
        assert torch.equal(y, want)
        assert torch.equal(live.view(torch.int16), plain.view(torch.int16))


def test_write_has_the_bits_of_any_batch():
    case = Case([70, 1, 0, 129], 32)
    kv = case.wide[:, -RANK - ROPE - 64 : -64]
    together, alone, want = (case.pages.clone() for _ in range(3))
    fixed.mla_write(kv, case.weight, 1e-5, case.rows, together)
    for i in range(4):
        fixed.mla_write(kv[i : i + 1].clone(), case.weight, 1e-5, case.rows[i : i + 1], alone)
    reference.mla_write(kv, case.weight, 1e-5, case.rows, want)
    assert torch.equal(together.view(torch.int16), alone.view(torch.int16))
    MLA_WRITE.equality.check(together[:-1], want[:-1])


@HEADS
def test_cudnn_prefill(heads):
    """New, one token, behind a context, behind several stretches; against the reference and PyTorch's own kernel."""
    lengths, totals = (100, 1, 257, 64), (100, 777, 1500, 64 + 2048)
    q, pages = randn(sum(lengths), heads, 192), randn(400, PAGE, RANK + ROPE) * 0.5
    pages[399], kv_b = torch.nan, randn(heads, 256, RANK) * RANK**-0.5
    table = torch.stack([torch.randperm(399, device="cuda")[:40] for _ in lengths])
    parts = Segments.of(lengths, totals, "cuda")
    got = cudnn.mla_prefill(q, parts, table, pages, kv_b)
    MLA_PREFILL.equality.check(got, reference.mla_prefill(q, parts, table, pages, kv_b))
    MLA_PREFILL.equality.check(got, sdpa.mla_prefill(q, parts, table, pages, kv_b))
    whole, cudnn.STRETCH = cudnn.STRETCH, 640
    try:
        MLA_PREFILL.equality.check(cudnn.mla_prefill(q, parts, table, pages, kv_b), got)
    finally:
        cudnn.STRETCH = whole


@pytest.mark.parametrize("causal", [False, True])
def test_cudnn_sums_are_natural_logarithms_of_scaled_scores(causal):
    q, k, v = randn(128, 4, 192), randn(128, 4, 192), randn(128, 4, 128)
    o, sums = cudnn.attend(q, k, v, causal=causal, sums=True)
    scores = torch.einsum("nhd,mhd->hnm", q.float(), k.float()) * 192**-0.5
    if causal:
        scores = scores.masked_fill(torch.ones(128, 128, dtype=torch.bool, device="cuda").triu(1), -torch.inf)
    assert o.shape == (128, 4, 128)
    torch.testing.assert_close(sums, scores.logsumexp(-1), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bound", [None, -5.0])
def test_log_decay(bound):
    forget, bias = randn(1000, 3 * 4096)[:, 4096:8192] * 8, randn(4096, dtype=torch.float32)
    args = (forget.unflatten(-1, (32, 128)), bias, torch.rand(32, device="cuda"), bound)
    got = log_decay(*args)
    KDA_GATE.equality.check(got, gate_reference.log_decay(*args))
    assert torch.equal(log_decay(args[0][3:4], *args[1:]), got[3:4])


@pytest.fixture(scope="module")
def real_layers() -> KimiForCausalLM:
    """The Kimi-Linear shape without its experts' bulk: three KDA layers and one MLA layer."""
    real = load_model_config(Path(__file__).parents[1] / "data/configs/kimi_linear_48b_config.json")
    assert real.moe is not None
    kinds = ("kda", "kda", "kda", "mla")
    moe = replace(real.moe, experts=16)
    small = replace(real, layer_kinds=kinds, moe_layers=(False, True, True, True), moe=moe, vocab_size=1024)
    model = KimiForCausalLM(small, dtype=torch.bfloat16, device="cuda")
    for p in model.parameters():
        p.normal_(0, 0.02) if p.dtype.is_floating_point else None
    return model


def decode_batch(requests: int, context: int) -> tuple[Batch, list]:
    index = torch.arange(requests, device="cuda")
    pages = -(-context // PAGE)
    table = torch.arange(requests * pages, device="cuda").view(requests, pages)
    ends = torch.full((requests,), context, device="cuda")
    offsets = torch.arange(requests + 1, device="cuda")
    batch = Batch(
        tokens=index,
        segments=Segments((1,) * requests, (0,) * requests, offsets, ends),
        prefill=Segments.of([], [], "cuda"),
        decodes=requests,
        slots=index,
        block_table=table,
        rows=table[:, -1] * PAGE + (context - 1) % PAGE,
        wanted=index,
    )
    state = KdaState(randn(requests, 3, 3 * 4096), randn(requests, 32, 128, 128, dtype=torch.float32) * 0.1)
    return batch, [state, state, state, LatentPages(randn(requests * pages + 1, PAGE, RANK + ROPE))]


def launches(call) -> list[str]:
    """Names of the kernels and copies that a call makes on the device."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    return [e.name for e in seen.events() or () if e.device_type.name == "CUDA"]


@pytest.mark.usefixtures("unpoisoned")
@pytest.mark.parametrize(("requests", "most"), [(1, 5), (8, 6), (32, 6)])
@torch.inference_mode()
def test_launches_of_attention_layers(real_layers, requests, most):
    batch, caches = decode_batch(requests, 1024)
    x = randn(requests, 2304)
    layers = list(real_layers.model.layers.values())
    mla = launches(lambda: layers[3].self_attn(x, batch, caches[3]))
    assert len(mla) <= most, mla
    kda = launches(lambda: layers[1].self_attn(x, batch, caches[1]))
    assert len(kda) <= 4, kda


@pytest.mark.usefixtures("unpoisoned")
@torch.inference_mode()
def test_launches_of_a_step(real_layers):
    """No adds, copies or fills between the layers: what is not attention or FFN is two norms a layer and the ends."""
    batch, caches = decode_batch(1, 1024)
    model, layers = real_layers.model, real_layers.model.layers.values()
    x = randn(1, 2304)
    inner = sum(len(launches(lambda i=i, c=c: i.self_attn(x, batch, c))) for i, c in zip(layers, caches, strict=True))
    inner += sum(len(launches(lambda i=i: getattr(i, i.ffn_name)(x, batch))) for i in layers)
    whole = launches(lambda: model(batch, caches))
    # the embedding; two norms a layer; the last rows are two look-ups (four launches at most) and the final norm
    assert len(whole) <= inner + 2 * 4 + 1 + 5, whole
