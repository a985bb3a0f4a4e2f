"""Rules and plan: what may be merged, what auto takes, and that an explicit wish is never silently dropped."""

import pytest
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny

from anabranch.config.fusion import FusionConfig
from anabranch.fusion.plan import make_plan
from anabranch.fusion.rules import Projection, path_groups, plain_projections, verdicts

FP8 = Projection(dtype="float8_e4m3fn", quantization="block-FP8")
MERGES = {"split", "whole", "overlap", "fused"}  # of more than q, k and v
K3, KL = model_config(kimi_k3_tiny()), model_config(kimi_linear_tiny())


def test_plain_projections_allow_everything_the_model_has():
    assert all(v.ok for v in verdicts(K3, "kda", plain_projections(K3, "kda", "bfloat16")).values())
    assert all(v.ok for v in verdicts(K3, "mla", plain_projections(K3, "mla", "bfloat16")).values())
    mla = verdicts(KL, "mla", plain_projections(KL, "mla", "bfloat16"))
    assert mla["separate"].ok
    assert mla["merged"].reason == "this model has no MLA output gate to merge"
    assert mla["overlap"].reason == "this model has no MLA output gate to overlap"


@pytest.mark.parametrize(
    ("member", "value", "refused", "reason"),
    [
        (
            "g_proj",
            Projection(dtype="bfloat16", adapter=True),
            {"split", "whole", "overlap", "fused"},
            "g_proj carries a LoRA adapter",
        ),
        (
            "f_a_proj",
            Projection(dtype="bfloat16", adapter=True),
            {"split", "whole", "overlap", "fused"},
            "f_a_proj carries",
        ),
        (
            "q_proj",
            Projection(dtype="float8_e4m3fn", quantization="block-FP8"),
            {"separate", *MERGES},
            "q_proj is block-FP8",
        ),
        (
            "b_proj",
            Projection(dtype="float16"),
            MERGES,
            "dtypes differ: f_a_proj bfloat16, b_proj float16",
        ),
    ],
)
def test_one_unfit_member_refuses_exactly_the_merges_it_is_in(member, value, refused, reason):
    members = plain_projections(K3, "kda", "bfloat16") | {member: value}
    got = verdicts(K3, "kda", members)
    assert {path for path, verdict in got.items() if not verdict.ok} == refused
    assert reason in got["split"].reason


def test_auto_takes_the_fewest_gemms_and_says_why_not_fewer():
    k3 = make_plan(K3, FusionConfig(), "bfloat16")
    assert (k3.kda.path, k3.mla.path) == ("whole", "merged")
    mla = make_plan(KL, FusionConfig(), "bfloat16").mla
    assert mla.path == "separate"
    assert "merged: this model has no MLA output gate to merge" in mla.reason


def test_an_explicit_wish_is_honoured_or_refused():
    assert make_plan(K3, FusionConfig(kda="separate", mla="separate"), "bfloat16").kda.path == "separate"
    with pytest.raises(ValueError, match="fusion mla=merged cannot be honoured: this model has no MLA output gate"):
        make_plan(KL, FusionConfig(mla="merged"), "bfloat16")


def test_every_path_has_rules_and_an_implementation():
    from anabranch.config.fusion import KDA_PATHS, MLA_PATHS
    from anabranch.fusion.kda_paths import kda_paths
    from anabranch.fusion.mla_paths import mla_paths

    for config in (K3, KL):
        assert tuple(path_groups(config, "kda")) == tuple(kda_paths(config.kda.full_rank_gate)) == KDA_PATHS
    assert tuple(path_groups(K3, "mla")) == tuple(mla_paths(True)) == MLA_PATHS
