"""The delta rule: chunk form against token form against the written-out definition; gates; slots; long horizons."""

import pytest
import torch
from helpers import ref_tiny

from anabranch.ops.kda_decode.reference import kda_decode
from anabranch.ops.kda_decode.spec import KDA_DECODE
from anabranch.ops.kda_gate.reference import log_decay
from anabranch.ops.kda_prefill.reference import kda_prefill
from anabranch.ops.kda_prefill.spec import KDA_PREFILL
from anabranch.ops.norm.reference import l2_norm
from anabranch.ops.segments import Segments

H, D = 3, 16


def tokens(n: int, seed: int = 0, g_scale: float = 1.0):
    torch.manual_seed(seed)
    q, k = l2_norm(torch.randn(n, H, D)), l2_norm(torch.randn(n, H, D))
    return q, k, torch.randn(n, H, D), -g_scale * torch.rand(n, H, D), torch.rand(n, H)


def definition(q, k, v, g, beta, state):
    """ref_tiny's token recurrence keeps the state K-first; ours is V-first."""
    o, S = ref_tiny.kda_recurrent(q, k, v, g, beta, state.mT)
    return o, S.mT


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 63, 64, 65, 200, 1025])
@pytest.mark.parametrize("fresh", [True, False])
def test_chunk_form_equals_the_definition(n, fresh):
    x = tokens(n)
    state = torch.zeros(2, H, D, D)
    if not fresh:
        state[1] = torch.randn(H, D, D)
    want, final = definition(*x, state[1].clone())
    got = kda_prefill(*x, Segments.of([n]), torch.tensor([1]), state)
    KDA_PREFILL.equality.check(got, want, "o")
    KDA_PREFILL.equality.check(state[1], final, "state")
    assert not state[0].any()


def test_decode_steps_equal_the_definition():
    x = tokens(40)
    state = torch.randn(1, H, D, D)
    want, final = definition(*x, state[0].clone())
    got = torch.cat([kda_decode(*(t[i : i + 1] for t in x), torch.tensor([0]), state) for i in range(40)])
    KDA_DECODE.equality.check(got, want, "o")
    KDA_DECODE.equality.check(state[0], final, "state")


def test_state_is_value_first():
    """One write of key e_0 and value e_1 must land in S[value 1, key 0]."""
    unit = torch.eye(D)
    q = k = unit[0].expand(1, H, D)
    v, g, beta = unit[1].expand(1, H, D), torch.zeros(1, H, D), torch.ones(1, H)
    for form in ("prefill", "decode"):
        state = torch.zeros(1, H, D, D)
        if form == "prefill":
            kda_prefill(q, k, v, g, beta, Segments.of([1]), torch.tensor([0]), state)
        else:
            kda_decode(q, k, v, g, beta, torch.tensor([0]), state)
        assert (state[0, :, 1, 0] == 1).all(), form
        assert state.sum() == H, form


@pytest.mark.parametrize("scale", [0.0, 5.0, 60.0])
def test_extreme_decays_never_overflow(scale):
    """60 a token is far beyond the bounded gate: only pairwise exponents survive it."""
    x = tokens(130, g_scale=scale)
    state = torch.zeros(1, H, D, D)
    want, final = definition(*x, state[0].clone())
    got = kda_prefill(*x, Segments.of([130]), torch.tensor([0]), state)
    assert got.isfinite().all()
    KDA_PREFILL.equality.check(got, want)
    KDA_PREFILL.equality.check(state[0], final)


def test_similar_keys_stay_accurate():
    """Equal keys make ||A|| large; expanding (I + A)^-1 by doubling would lose every digit here."""
    q, k, v, g, beta = tokens(64)
    k = l2_norm(k[:1] + 0.01 * k)
    x = (q, k, v, g * 0.01, torch.full_like(beta, 0.95))
    state = torch.zeros(1, H, D, D)
    want, final = definition(*x, state[0].clone())
    KDA_PREFILL.equality.check(kda_prefill(*x, Segments.of([64]), torch.tensor([0]), state), want)
    KDA_PREFILL.equality.check(state[0], final)


def test_ragged_batch_and_no_slot():
    q, k, v, g, beta = tokens(50)
    v[10:13] = float("nan")
    lengths, slots = [10, 3, 37], torch.tensor([2, -1, 0])
    state = torch.randn(3, H, D, D)
    before = state.clone()
    got = kda_prefill(q, k, v, g, beta, Segments.of(lengths), slots, state)
    assert torch.equal(got[10:13], torch.zeros(3, H, D))
    assert torch.equal(state[1], before[1])
    for part, slot in ((slice(0, 10), 2), (slice(13, 50), 0)):
        alone = before[slot : slot + 1].clone()
        n = part.stop - part.start
        want = kda_prefill(q[part], k[part], v[part], g[part], beta[part], Segments.of([n]), torch.tensor([0]), alone)
        assert torch.equal(got[part], want)
        assert torch.equal(state[slot], alone[0])


def test_decode_without_a_slot_is_zero_and_touches_nothing():
    q, k, v, g, beta = tokens(3)
    v[1] = float("nan")
    state = torch.randn(4, H, D, D)
    before = state.clone()
    slots = torch.tensor([3, 9, -1, 9, 0])[::2]  # a strided view: 3, -1, 0
    o = kda_decode(q, k, v, g, beta, slots, state)
    assert torch.equal(o[1], torch.zeros(H, D))
    assert o.isfinite().all()
    assert torch.equal(state[1:3], before[1:3])
    assert not torch.equal(state[0], before[0])


def test_4096_steps_drift_no_more_than_declared():
    """A state rounded to bf16 at every step would forget or never forget; fp32 must hold over a long answer."""
    x = tokens(4096, g_scale=0.05)
    state = torch.zeros(1, H, D, D)
    double = torch.zeros(1, H, D, D, dtype=torch.float64)
    for i in range(4096):
        kda_decode(*(t[i : i + 1] for t in x), torch.tensor([0]), state)
    _, final = definition(*(t.double() for t in x), double[0])
    assert (state[0] - final).abs().max() < 1e-5 * final.abs().max()


def test_softplus_gate_values():
    f = torch.tensor([[[-30.0, -1.0, 0.0, 1.0, 19.9, 20.1, 500.0]]])
    bias, a_log = torch.zeros(7), torch.tensor([0.7])
    want = -torch.exp(a_log.double()) * torch.logaddexp(f.double(), torch.zeros(()).double())
    torch.testing.assert_close(log_decay(f, bias, a_log, None).double(), want, rtol=1e-6, atol=1e-12)


def test_bounded_gate_is_a_sigmoid_not_a_clamp_and_the_bias_is_inside():
    f = torch.tensor([[[-9.0, -1.0, 0.0, 3.0]], [[9.0, 40.0, -40.0, 0.5]]])
    bias, a_log = torch.tensor([1.0, -2.0, 0.5, 0.0]), torch.tensor([0.9])
    got = log_decay(f, bias, a_log, -5.0)
    want = -5.0 / (1.0 + torch.exp(-torch.exp(a_log.double()) * (f + bias).double()))
    torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-30)
    assert (got >= -5).all()
    assert (got <= 0).all()


def test_l2_eps_is_added_to_the_sum():
    """For a tiny vector an eps on the mean would be 128 times as strong."""
    x = torch.full((1, 1, 128), 1e-4)
    want = 1e-4 / (128 * 1e-8 + 1e-6) ** 0.5
    torch.testing.assert_close(l2_norm(x), torch.full_like(x, want), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_state_is_that_of_a_prompt_which_ends_there(dtype):
    """Segments of 150, 64, 70 (without a slot) and 1 token have 3, 1, 2 and 1 chunks."""
    lengths, slots = [150, 64, 70, 1], torch.tensor([2, 0, -1, 5])
    rows, state = tokens(sum(lengths)), torch.randn(9, H, D, D).to(dtype)
    want, before = state.clone(), state.clone()
    saves = torch.tensor([-1, 7, -1, 8, 1, -1, 3])
    got = kda_prefill(*rows, Segments.of(lengths), slots, state, saves)
    out = kda_prefill(*rows, Segments.of(lengths), slots, want)
    torch.testing.assert_close(got, out, rtol=1e-2 if dtype == torch.bfloat16 else 1e-4, atol=1e-2)
    for slot, first, end, target in ((2, 0, 128, 7), (0, 150, 214, 8), (5, 284, 285, 3)):
        alone = before.clone()
        kda_prefill(*(t[first:end] for t in rows), Segments.of([end - first]), torch.tensor([slot]), alone)
        assert torch.equal(alone[slot], state[target])
    assert torch.equal(state[[1, 4, 6]], before[[1, 4, 6]])
