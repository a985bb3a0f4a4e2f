"""Attention kernels on a real GPU at the shapes of the released models: references, bits, CUDA graphs."""

from collections.abc import Callable

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)
pytest.importorskip("triton")

from anabranch.ops.conv import reference as conv_reference
from anabranch.ops.conv.spec import CONV
from anabranch.ops.conv.triton import conv
from anabranch.ops.kda_decode import reference as decode_reference
from anabranch.ops.kda_decode.spec import KDA_DECODE
from anabranch.ops.kda_decode.triton import kda_decode
from anabranch.ops.kda_gate.reference import log_decay
from anabranch.ops.kda_prefill import reference as prefill_reference
from anabranch.ops.kda_prefill.spec import KDA_PREFILL
from anabranch.ops.kda_prefill.triton import kda_prefill
from anabranch.ops.kda_step.triton import kda_step
from anabranch.ops.mla import reference as mla_reference
from anabranch.ops.mla import sdpa
from anabranch.ops.mla.spec import MLA_DECODE, MLA_PREFILL
from anabranch.ops.mla.triton import mla_decode, mla_prefill
from anabranch.ops.norm.reference import gated_rms_norm, l2_norm
from anabranch.ops.segments import Segments

HEADS = pytest.mark.parametrize("heads", [12, 32, 96])
STATES = pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16])
D, DEVICE = 128, "cuda"


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def indices(*values: int) -> torch.Tensor:
    return torch.tensor(values, device=DEVICE)


def replayed(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor], pools: list[torch.Tensor]) -> None:
    """Capture call(*inputs, *pools); three replays on changed inputs must give the bits of plain calls, pools too.

    The poisoning of fresh memory is captured as well, so an output that a replay leaves unwritten is NaN.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call(*inputs, *[p.clone() for p in pools])
    torch.cuda.current_stream().wait_stream(stream)
    live, plain = [p.clone() for p in pools], [p.clone() for p in pools]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call(*inputs, *live)
    for _ in range(3):
        for t in inputs:
            if t.is_floating_point():
                t.copy_(t.flip(0) * 0.9)
        graph.replay()
        want = call(*inputs, *plain)
        assert output.isfinite().all()
        assert torch.equal(output, want)
        assert all(torch.equal(a, b) for a, b in zip(live, plain, strict=True))


def token_inputs(heads: int, n: int) -> list[torch.Tensor]:
    """q, k, v, g, beta; v is a slice of wider rows."""
    v = randn(n, 3 * heads * D)[:, 2 * heads * D :].unflatten(1, (heads, D))
    q, k = (l2_norm(randn(n, heads, D)) for _ in range(2))
    g, beta = -torch.rand(n, heads, D, device=DEVICE), torch.rand(n, heads, device=DEVICE)
    return [q, k, v, g, beta]


@HEADS
@STATES
def test_decode_step(heads, state_dtype):
    x, state = token_inputs(heads, 5), randn(7, heads, D, D, dtype=state_dtype)
    slots, before, want_state = indices(6, 0, -1, 3, 2), state.clone(), state.clone()
    got = kda_decode(*x, slots, state)
    KDA_DECODE.equality.check(got, decode_reference.kda_decode(*x, slots, want_state), "o")
    KDA_DECODE.equality.check(state, want_state, "state")
    assert torch.equal(state[[1, 4, 5]], before[[1, 4, 5]])
    alone = before.clone()
    for i in range(5):
        assert torch.equal(kda_decode(*(t[i : i + 1] for t in x), slots[i : i + 1], alone)[0], got[i])
    assert torch.equal(alone, state)
    replayed(lambda *a: kda_decode(*a[:5], slots, a[5]), x, [before])


@HEADS
@STATES
def test_prefill_is_as_many_decode_steps_bit_for_bit(heads, state_dtype):
    n, x = 70, token_inputs(heads, 70)
    start = randn(4, heads, D, D, dtype=state_dtype)
    steps, split, want_state = start.clone(), start.clone(), start.clone()
    want = torch.cat([kda_decode(*(t[i : i + 1] for t in x), indices(2), steps) for i in range(n)])
    parts = [
        kda_prefill(*(t[a:b] for t in x), segments(b - a), indices(2), split) for a, b in ((0, 1), (1, 66), (66, n))
    ]
    assert torch.equal(torch.cat(parts), want)
    assert torch.equal(split, steps)
    mixed = start.clone()
    both = kda_prefill(*(torch.cat([t[:9], t]) for t in x), segments(9, n), indices(0, 2), mixed)
    assert torch.equal(both[9:], want)
    if state_dtype == torch.float32:  # the chunk form does not round a bf16 state at every token
        KDA_PREFILL.equality.check(want, prefill_reference.kda_prefill(*x, segments(n), indices(2), want_state))
        torch.testing.assert_close(steps, want_state, rtol=1e-4, atol=1e-5)


def segments(*lengths: int, totals: tuple[int, ...] | None = None) -> Segments:
    return Segments.of(lengths, totals, DEVICE)


@HEADS
@STATES
@pytest.mark.parametrize("bound", [None, -5.0])
def test_fused_decode_step(heads, state_dtype, bound):
    width, slots = heads * D, indices(5, 0, -1, 3)
    wide = randn(4, 5 * width + heads + 64)
    qkv, forget, gate = wide[:, : 3 * width], wide[:, 3 * width : 4 * width], wide[:, 4 * width : 5 * width]
    beta = wide[:, 5 * width : 5 * width + heads]
    weight, bias = randn(3 * width, 4, dtype=torch.float32), randn(width, dtype=torch.float32)
    a_log, norm = torch.rand(heads, device=DEVICE), randn(D, dtype=torch.float32)
    history, state = randn(6, 3, 3 * width), randn(6, heads, D, D, dtype=state_dtype)

    def fused(qkv, forget, beta, gate, history, state, slots=slots):
        shared = (bias, a_log, bound, norm, 1e-5)
        return kda_step(qkv, history, weight, forget, beta, gate, *shared, slots, state)

    chain_history, chain_state = history.clone(), state.clone()
    mixed = conv_reference.conv(qkv, segments(1, 1, 1, 1), slots, chain_history, weight)
    q, k, v = (part.unflatten(-1, (heads, D)) for part in mixed.split(width, -1))
    g = log_decay(forget.unflatten(-1, (heads, D)), bias, a_log, bound)
    o = decode_reference.kda_decode(l2_norm(q), l2_norm(k), v, g, torch.sigmoid(beta.float()), slots, chain_state)
    want = gated_rms_norm(o, gate, norm, 1e-5)
    own_history, own_state = history.clone(), state.clone()
    got = fused(qkv, forget, beta, gate, own_history, own_state)
    KDA_PREFILL.equality.check(got, want, "y")
    assert torch.equal(own_history, chain_history)
    # a conv output may round the other way, which a fp32 state shows as one bf16 step of a key or value
    torch.testing.assert_close(own_state.float(), chain_state.float(), rtol=1e-2, atol=1e-2)
    history_alone, state_alone = history.clone(), state.clone()
    for i in range(4):
        row = (t[i : i + 1] for t in (qkv, forget, beta, gate))
        assert torch.equal(fused(*row, history_alone, state_alone, slots[i : i + 1])[0], got[i])
    assert torch.equal(state_alone, own_state)
    for _ in range(20):  # a race over the shared history would show sooner or later
        again_history, again_state = history.clone(), state.clone()
        assert torch.equal(fused(qkv, forget, beta, gate, again_history, again_state), got)
        assert torch.equal(again_history, own_history)
    replayed(fused, [qkv.clone(), forget.clone(), beta.clone(), gate.clone()], [history, state])


@HEADS
@pytest.mark.parametrize("lengths", [[1] * 9, [1, 300, 2, 7], [2048]])
def test_conv(heads, lengths):
    width, tokens = 3 * heads * D, sum(lengths)
    x, weight = randn(tokens, width + 192)[:, :width], randn(width, 4, dtype=torch.float32)
    history, slots = randn(12, 3, width), torch.randperm(12, device=DEVICE)[: len(lengths)]
    own, want_history, parts = history.clone(), history.clone(), segments(*lengths)
    got = conv(x, parts, slots, own, weight)
    CONV.equality.check(got, conv_reference.conv(x, parts, slots, want_history, weight))
    assert torch.equal(own, want_history)
    first = lengths[0]  # a decode step after the same tokens gives the bits of the longer segment
    stepped = history.clone()
    steps = [conv(x[i : i + 1], segments(1), slots[:1], stepped, weight) for i in range(min(first, 5))]
    assert torch.equal(torch.cat(steps), got[: len(steps)])
    if first == 1:
        slots[2] = -1
        replayed(lambda x, pool: conv(x, parts, slots, pool, weight), [x.clone()], [history])


def latent_inputs(heads: int, queries: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    q, pages = randn(queries, heads, 192), randn(400, 64, 576) * 0.5
    pages[399] = float("nan")
    return q, pages, randn(heads, 256, 512) * 512**-0.5


@HEADS
def test_latent_decode(heads):
    totals = indices(1, 64, 0, 4097, 10_000, 513)
    q, pages, kv_b = latent_inputs(heads, len(totals))
    table = torch.stack([torch.randperm(399, device=DEVICE)[:160] for _ in totals])
    got = mla_decode(q, totals, table, pages, kv_b)
    MLA_DECODE.equality.check(got, mla_reference.mla_decode(q, totals, table, pages, kv_b))
    assert not got[2].any()
    for i in (0, 3, 4, 5):
        alone = mla_decode(q[i : i + 1], totals[i : i + 1], table[i : i + 1], pages, kv_b)
        assert torch.equal(alone[0], got[i])
        width = max(1, -(-int(totals[i]) // 64))
        many = mla_decode(*(t[i : i + 1].repeat_interleave(70, 0) for t in (q, totals, table[:, :width])), pages, kv_b)
        assert torch.equal(many, got[i].expand_as(many))
    replayed(lambda q: mla_decode(q, totals, table, pages, kv_b), [q], [])


@HEADS
def test_latent_prefill(heads):
    lengths, ends = (100, 1, 257), (100, 777, 1500)
    q, pages, kv_b = latent_inputs(heads, sum(lengths))
    table = torch.stack([torch.randperm(399, device=DEVICE)[:24] for _ in lengths])
    parts = segments(*lengths, totals=ends)
    got = mla_prefill(q, parts, table, pages, kv_b)
    want = mla_reference.mla_prefill(q, parts, table, pages, kv_b)
    MLA_PREFILL.equality.check(got, want)
    MLA_PREFILL.equality.check(sdpa.mla_prefill(q, parts, table, pages, kv_b), want)
    for token, sequence, total in ((0, 0, 1), (99, 0, 100), (100, 1, 777), (101, 2, 1244), (357, 2, 1500)):
        one = slice(token, token + 1)
        step = mla_decode(q[one], indices(total), table[sequence : sequence + 1], pages, kv_b)
        assert torch.equal(step[0], got[token]), (token, total)


def test_long_context_and_large_pool_use_wide_addresses():
    """The last page of this pool lies behind 2^31 elements."""
    heads, count = 12, 60_000
    pages = torch.zeros(count, 64, 576, dtype=torch.bfloat16, device=DEVICE)
    q, _, kv_b = latent_inputs(heads, 1)
    last = pages[-40:].normal_()
    table = torch.arange(count - 40, count, device=DEVICE)[None]
    got = mla_decode(q, indices(2500), table, pages, kv_b)
    near = mla_decode(q, indices(2500), table - (count - 40), last.clone(), kv_b)
    assert torch.equal(got, near)


@pytest.mark.parametrize("heads", [12, 32])
def test_chunk_form_of_fla(heads):
    pytest.importorskip("fla.ops.kda")
    from anabranch.ops.kda_prefill.fla import kda_prefill as chunked

    lengths = (300, 5, 64, 1)
    x, slots = token_inputs(heads, sum(lengths)), indices(4, -1, 0, 2)
    x[2][300:305] = float("nan")
    state = randn(6, heads, D, D, dtype=torch.float32) * 0.1
    before, want_state = state.clone(), state.clone()
    got = chunked(*x, segments(*lengths), slots, state)
    want = prefill_reference.kda_prefill(*x, segments(*lengths), slots, want_state)
    KDA_PREFILL.equality.check(got, want, "o")
    assert (state - want_state).abs().max() < 1.5e-2 * want_state.abs().max()
    assert not got[300:305].any()
    assert torch.equal(state[[1, 3, 5]], before[[1, 3, 5]])
    untouched = state.clone()
    assert not chunked(*(t[:5] for t in x), segments(5), indices(-1), state).any()
    assert torch.equal(state, untouched)
