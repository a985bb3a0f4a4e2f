"""FFN-side kernels on a GPU: the declared class at real shapes, bits that do not know the batch, and graph replay.

Poisoned memory comes from the suite's own fixture; inside a capture the poison is part of the graph, so every replay
starts from NaN outputs.
"""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.banks import PlainBank, plain_bank, random_routing

from anabranch.config.model import ActivationConfig
from anabranch.ops.attn_residual import reference as residual_reference
from anabranch.ops.attn_residual.spec import RESIDUAL_NORM
from anabranch.ops.attn_residual.triton import residual_norm
from anabranch.ops.experts import reference as experts_reference
from anabranch.ops.experts.plan import Plan, Tile
from anabranch.ops.experts.spec import EXPERTS
from anabranch.ops.experts.triton import routed_experts
from anabranch.ops.gate import reference as gate_reference
from anabranch.ops.gate.spec import GATE
from anabranch.ops.gate.triton import sigmoid_gate
from anabranch.ops.glu import reference as glu_reference
from anabranch.ops.glu.spec import GLU
from anabranch.ops.glu.triton import glu
from anabranch.ops.linear.spec import LINEAR
from anabranch.ops.linear.triton import batched_linear, linear
from anabranch.ops.log_softmax import reference as log_softmax_reference
from anabranch.ops.log_softmax.spec import LOG_SOFTMAX, PICK
from anabranch.ops.log_softmax.triton import log_softmax, pick
from anabranch.ops.norm import reference as norm_reference
from anabranch.ops.norm.spec import GATED_RMS_NORM, RMS_NORM
from anabranch.ops.norm.triton import add_rms_norm, gated_rms_norm, l2_norm, rms_norm
from anabranch.ops.router import reference as router_reference
from anabranch.ops.router.triton import route
from anabranch.ops.spec import BITWISE

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
SILU = ActivationConfig(name="silu")
SITU = ActivationConfig(name="situ", beta=4.0, linear_beta=25.0)
ROWS = (1, 7, 16, 17, 64, 65, 128, 512)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, spread: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, device="cuda") * spread).to(dtype)


def replays_equal_eager(call: Callable[..., torch.Tensor], make: Callable[[], tuple[torch.Tensor, ...]]) -> None:
    """Capture once, then three replays with new inputs, each bitwise equal to an eager call."""
    inputs = make()
    call(*inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = call(*inputs)
    for _ in range(3):
        fresh = make()
        for old, new in zip(inputs, fresh, strict=True):
            old.copy_(new)
        out.fill_(float("nan"))
        graph.replay()
        BITWISE.check(out, call(*fresh))


@DTYPES
def test_gate_is_bitwise_and_replays(dtype):
    for spread in (1, 30, 1000):
        x, g = randn(513, 4096, dtype=dtype), randn(513, 5000, dtype=dtype, spread=spread)[:, 3:4099]
        GATE.equality.check(sigmoid_gate(x, g), gate_reference.sigmoid_gate(x, g))
    replays_equal_eager(sigmoid_gate, lambda: (randn(9, 4096, dtype=dtype), randn(9, 4096, dtype=dtype)))


def residuals(x: torch.Tensor, ops=None) -> torch.Tensor:
    bank, ones = [x * (j + 1) / 7 for j in range(7)] + [x.roll(1, 1)], torch.ones_like(x[0])
    read = residual_norm if ops is None else ops.residual_norm
    return torch.cat(read(x, x.flip(1), bank, ones, ones.roll(1)[None] / x.shape[1] ** 0.5, ones, 1e-5), -1)


ROWWISE = {
    "rms_norm_2304": (RMS_NORM, 2304, lambda x: rms_norm(x, x.new_ones(2304), 1e-5), None),
    "rms_norm_7168": (RMS_NORM, 7168, lambda x: rms_norm(x, x.new_ones(7168), 1e-5), None),
    "l2_norm": (
        RMS_NORM,
        4096,
        lambda x: l2_norm(x.unflatten(-1, (32, 128))),
        lambda x: norm_reference.l2_norm(x.unflatten(-1, (32, 128))),
    ),
    "gated_rms_norm": (
        GATED_RMS_NORM,
        4096,
        lambda x: gated_rms_norm(x.unflatten(-1, (32, 128)), x, torch.ones(128, device="cuda"), 1e-5),
        lambda x: norm_reference.gated_rms_norm(x.unflatten(-1, (32, 128)), x, torch.ones(128, device="cuda"), 1e-5),
    ),
    "swiglu": (GLU, 2048, lambda x: glu(x, SILU), lambda x: glu_reference.glu(x, SILU)),
    "situ": (GLU, 12288, lambda x: glu(x * 9, SITU), lambda x: glu_reference.glu(x * 9, SITU)),
    "residual_norm": (RESIDUAL_NORM, 7168, residuals, lambda x: residuals(x, residual_reference)),
    "log_softmax": (
        LOG_SOFTMAX,
        163_840,
        lambda x: log_softmax(x.float() * 4),
        lambda x: log_softmax_reference.log_softmax(x.float() * 4),
    ),
    "pick": (
        PICK,
        163_840,
        lambda x: torch.stack([part.float() for part in pick(x.float() * 4)], -1),
        lambda x: torch.stack([part.float() for part in log_softmax_reference.pick(x.float() * 4)], -1),
    ),
}


@DTYPES
@pytest.mark.parametrize("name", ROWWISE)
def test_row_kernels(name, dtype):
    spec, width, call, want = ROWWISE[name]
    reference = want or (lambda x: norm_reference.rms_norm(x, x.new_ones(width), 1e-5))
    rows = 33 if width < 100_000 else 5
    x = randn(rows, width, dtype=dtype)
    got = call(x)
    spec.equality.check(got, reference(x))
    wide = torch.zeros(rows, width + 48, dtype=dtype, device="cuda")
    for offset in (16, 5):  # aligned and not: a row's place in memory must not show
        view = wide[:, offset : offset + width]
        view.copy_(x)
        BITWISE.check(call(view), got)
        BITWISE.check(call(view[3:4]), got[3:4])
    replays_equal_eager(call, lambda: (randn(rows, width, dtype=dtype),))


@DTYPES
def test_gated_norm_at_the_ends_of_its_gate(dtype):
    """(token, head) rows that fill no program; gates that close, open, and are no number."""
    ends = torch.tensor([-torch.inf, -200.0, -88.0, 0.0, 20.0, 200.0, torch.inf, torch.nan]).to(dtype)
    for tokens in (1, 77, 1024):
        x, weight = randn(tokens, 3 * 128, dtype=dtype).unflatten(-1, (3, 128)), torch.rand(128, device="cuda")
        gate = ends.cuda().repeat(tokens, 3 * 16)
        got, want = (f(x, gate, weight, 1e-5) for f in (gated_rms_norm, norm_reference.gated_rms_norm))
        assert torch.equal(got.isnan(), want.isnan())
        GATED_RMS_NORM.equality.check(got.nan_to_num(), want.nan_to_num())
        assert not got.unflatten(-1, (-1, 8))[..., :2].any()


@DTYPES
def test_add_rms_norm_equals_its_two_steps(dtype):
    x, update, weight = randn(65, 2304, dtype=dtype), randn(65, 2304, dtype=dtype), randn(2304, dtype=dtype)
    total, normed = add_rms_norm(x, update, weight, 1e-5)
    BITWISE.check(total, x + update)
    BITWISE.check(normed, rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize(
    ("dtype", "rows", "columns"),
    [(torch.bfloat16, 1168, 2304), (torch.bfloat16, 129, 70), (torch.float32, 576, 2304)],
)
def test_linear_bits_depend_on_the_row_alone(dtype, rows, columns):
    x, w = randn(max(ROWS), columns, dtype=dtype), randn(rows, columns + 16, dtype=dtype, spread=0.02)[:, :columns]
    whole = linear(x, w)
    LINEAR.equality.check(whole, (x.double() @ w.double().T).to(dtype))
    for m in ROWS:
        BITWISE.check(linear(x[:m], w), whole[:m], f"first {m} rows")
        BITWISE.check(linear(x[m - 1 : m], w), whole[m - 1 : m], f"row {m - 1} alone")
    for cut in (1, 64, 100):
        BITWISE.check(linear(x, w[:cut]), whole[:, :cut])
        BITWISE.check(linear(x[:17], w[cut:]), whole[:17, cut:])
    BITWISE.check(batched_linear(x.expand(2, -1, -1), torch.stack([w, w]))[1], whole)


def test_linear_replays():
    w = randn(1168, 2304, spread=0.02)
    for m in (1, 65):
        replays_equal_eager(lambda x: linear(x, w), lambda m=m: (randn(m, 2304),))


@DTYPES
@pytest.mark.parametrize("config", ["real_kl", "real_k3"])
def test_router(request, config, dtype):
    model = request.getfixturevalue(config)
    moe, width = model.moe, model.hidden_size
    x, weight = randn(4100, width, dtype=dtype), randn(moe.experts, width, dtype=dtype, spread=0.02)
    bias = torch.rand(moe.experts, device="cuda") * 0.1
    weights, chosen = route(x, weight, bias, moe)
    scores = torch.sigmoid(x.double() @ weight.double().T)
    order = (scores + bias.double()).sort(descending=True).values
    clear = (order[:, : moe.top_k] - order[:, 1 : moe.top_k + 1]).amin(-1) > 1e-5
    want_weights, want = router_reference.route(x, weight, bias, moe)
    assert clear.float().mean() > 0.5
    assert torch.equal(chosen[clear], want[clear])
    torch.testing.assert_close(weights[clear], want_weights[clear], rtol=5e-6, atol=1e-7)
    for m in (1, 16, 17, 64, 128, 129, 1000, 1200, 2000):  # every tile of `logit_tile`
        part = route(x[:m], weight, bias, moe)
        BITWISE.check(part[0], weights[:m], f"weights of {m} tokens")
        BITWISE.check(part[1], chosen[:m], f"experts of {m} tokens")


def test_the_lower_expert_wins_a_tie(real_kl):
    moe = replace(real_kl.moe, experts=256)
    _, chosen = route(randn(3, 64), torch.zeros(256, 64, device="cuda").bfloat16(), torch.zeros(256).cuda(), moe)
    assert chosen.tolist() == [list(range(8))] * 3


def test_router_replays(real_kl):
    weight, bias = randn(256, 2304, spread=0.02), torch.zeros(256, device="cuda")
    for m in (1, 129, 4100):
        replays_equal_eager(lambda x: route(x, weight, bias, real_kl.moe)[0], lambda m=m: (randn(m, 2304),))


@pytest.fixture(scope="module")
def kl_bank() -> PlainBank:
    return plain_bank(256, 1024, 2304, torch.bfloat16, device="cuda")


@pytest.mark.parametrize("tokens", [1, 128, 1000, 4096])
def test_experts_at_the_kimi_linear_shape(kl_bank, tokens):
    """1 and 128 tokens take the small tiles, 1000 the middle ones, 4096 the large ones."""
    x, (weights, chosen) = randn(tokens, 2304), random_routing(tokens, 256, 8, "cuda")
    got = routed_experts(x, weights, chosen, kl_bank, SILU)
    want = experts_reference.routed_experts(x, weights, chosen, kl_bank, SILU)
    EXPERTS.equality.check(got.bfloat16(), want.bfloat16())
    BITWISE.check(routed_experts(x, weights, chosen, kl_bank, SILU), got, "second run")
    for m in {1, min(tokens, 16), min(tokens, 128)}:
        part = routed_experts(x[-m:], weights[-m:], chosen[-m:], kl_bank, SILU)
        BITWISE.check(part, got[-m:], f"last {m} tokens")


def test_no_tile_changes_a_bit(kl_bank):
    x, (weights, chosen) = randn(1000, 2304), random_routing(1000, 256, 8, "cuda")
    want = routed_experts(x, weights, chosen, kl_bank, SILU)
    for T, R, K, warps in ((16, 64, 128, 4), (32, 128, 64, 4), (128, 128, 64, 8)):
        tile = Tile(T=T, R=R, K=K, num_warps=warps, num_stages=3)
        BITWISE.check(routed_experts(x, weights, chosen, kl_bank, SILU, Plan(wide=tile, narrow=tile)), want, str(tile))


def test_ranks_add_up(kl_bank):
    x, (weights, chosen) = randn(128, 2304), random_routing(128, 256, 8, "cuda")
    whole = routed_experts(x, weights, chosen, kl_bank, SILU)
    total = torch.zeros_like(whole)
    for first in (0, 64, 128, 192):
        span = slice(first, first + 64)
        part = PlainBank(first=first, count=64, w13=kl_bank.w13[span], w2=kl_bank.w2[span])
        total += routed_experts(x, weights, chosen, part, SILU)
        alone = routed_experts(x[3:4], weights[3:4], chosen[3:4], part, SILU)
        BITWISE.check(alone, routed_experts(x, weights, chosen, part, SILU)[3:4])
    torch.testing.assert_close(total, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 16, 1000])
def test_experts_replay(kl_bank, tokens):
    def make() -> tuple[torch.Tensor, ...]:
        return randn(tokens, 2304), *random_routing(tokens, 256, 8, "cuda")

    replays_equal_eager(lambda x, w, e: routed_experts(x, w, e, kl_bank, SILU), make)


def test_one_expert_takes_every_token(kl_bank):
    x, weights = randn(600, 2304), torch.rand(600, 8, device="cuda")
    chosen = torch.arange(8, device="cuda").expand(600, -1).flip(1)
    got = routed_experts(x, weights, chosen, kl_bank, SILU)
    want = experts_reference.routed_experts(x, weights, chosen, kl_bank, SILU)
    EXPERTS.equality.check(got.bfloat16(), want.bfloat16())


def test_experts_in_fp32():
    bank = plain_bank(8, 96, 160, torch.float32, device="cuda", spread=0.1)
    x, (weights, chosen) = randn(50, 160, dtype=torch.float32), random_routing(50, 8, 3, "cuda")
    got = routed_experts(x, weights, chosen, bank, SITU)
    EXPERTS.equality.check(got, experts_reference.routed_experts(x, weights, chosen, bank, SITU))
    BITWISE.check(routed_experts(x[9:10], weights[9:10], chosen[9:10], bank, SITU), got[9:10])
