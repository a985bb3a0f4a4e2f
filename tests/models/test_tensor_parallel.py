"""Whole models over simulated ranks equal one rank, in fp64: sharding, reductions, gathers and fused paths together."""

import pytest
import torch
from helpers.oracle import Session, engine_model
from helpers.ranks import rank_models, run_ranks
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights

from anabranch.config.fusion import FusionConfig
from anabranch.parallel.layout import Layout

SEPARATE = FusionConfig(kda="separate", mla="separate")
CASES = {
    "kimi-linear": kimi_linear_tiny(kda_heads=8, heads=8, vocab=99),
    "kimi-k3": kimi_k3_tiny(kda_heads=8, heads=8, a_log_len=12, vocab=99),
}


@pytest.mark.usefixtures("double_precision")
@pytest.mark.parametrize(
    "fusion", [FusionConfig(kda="separate", mla="separate"), FusionConfig()], ids=["separate", "auto"]
)
@pytest.mark.parametrize(
    "layout", [Layout(tp=2), Layout(tp=4), Layout(tp=8), Layout(tp=2, ep=2), Layout(tp=4, ep=2)], ids=str
)
@pytest.mark.parametrize("case", CASES)
def test_ranks_equal_one_rank(case, layout, fusion):
    tiny = CASES[case]
    full = engine_model(tiny, {n: t.double() for n, t in random_weights(tiny, 2).items()})
    full.dtype = torch.float64
    ids = [(11 * i + 2) % tiny.vocab for i in range(24)]

    def answer(model) -> torch.Tensor:
        session = Session(model)
        parts = session.step((1, ids[:9])) + session.step((1, ids[9:20]))
        for token in ids[20:]:
            parts += session.step((1, [token]), decodes=1)
        return torch.cat(parts)

    want = answer(full)
    models = rank_models(full, layout, fusion)
    for got in run_ranks(layout.tp, lambda rank: answer(models[rank])):
        assert (got - want).abs().max() < 1e-9
