"""Rules and plan: what may be merged, what auto takes, and that an explicit wish is never silently dropped."""

import pytest
from helpers.oracle import model_config
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny

from anabranch.config.fusion import FusionConfig
from anabranch.config.verdict import Verdict
from anabranch.fusion.plan import make_plan
from anabranch.fusion.rules import ANY_STEP, Projection, Step, path_groups, plain_projections, verdicts

FP8 = Projection(dtype="float8_e4m3fn", quantization="block-FP8")
MERGES = {"split", "whole", "overlap", "fused", "deferred"}  # of more than q, k and v
K3, KL = model_config(kimi_k3_tiny()), model_config(kimi_linear_tiny())


PLAIN = plain_projections(K3, "kda", "bfloat16")


def test_plain_projections_allow_everything_the_model_has():
    assert all(v.ok for v in verdicts(K3, "kda", PLAIN).values())
    low = verdicts(KL, "kda", plain_projections(KL, "kda", "bfloat16"))
    assert {path for path, verdict in low.items() if not verdict.ok} == {"deferred"}
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
            MERGES,
            "g_proj carries a LoRA adapter",
        ),
        (
            "f_a_proj",
            Projection(dtype="bfloat16", adapter=True),
            MERGES,
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


@pytest.mark.parametrize("name", ["cuda", "reference", None])
def test_a_decay_may_wait_for_a_step_that_takes_it(name):
    verdict = verdicts(K3, "kda", PLAIN, Step(name=name))["deferred"]
    assert verdict == Verdict(
        True, "6 projections in bfloat16, one buffer; f_b inside the decode step (kda_step=cuda or reference)"
    )


@pytest.mark.parametrize(
    ("config", "changed", "step", "reason"),
    [
        (K3, {}, Step(name="triton"), "f_b inside the decode step needs kda_step=cuda or reference, here it is triton"),
        (K3, {}, Step(name="chain"), "f_b inside the decode step needs kda_step=cuda or reference, here it is chain"),
        (
            K3,
            {},
            Step(name="cuda", deterministic=True),
            "deterministic mode decodes by the operations of prompts, which take no f_b",
        ),
        (KL, {}, ANY_STEP, "behind a low-rank gate g_b needs a launch of its own, and f_b rides in it"),
        (
            K3,
            {"f_b_proj": Projection(dtype="bfloat16", adapter=True)},
            ANY_STEP,
            "f_b_proj carries a LoRA adapter, which the decode step would bypass",
        ),
        (
            K3,
            {"f_a_proj": Projection(dtype="bfloat16", adapter=True)},
            ANY_STEP,
            "f_a_proj carries a LoRA adapter, which a merged GEMM would bypass",
        ),
        (K3, {"q_proj": FP8}, ANY_STEP, "q_proj is block-FP8 and k_proj is bfloat16: merging would lose its scales"),
    ],
)
def test_a_decay_does_not_wait_for_anything_else(config, changed, step, reason):
    members = plain_projections(config, "kda", "bfloat16") | changed
    assert verdicts(config, "kda", members, step)["deferred"] == Verdict(False, reason)


@pytest.mark.parametrize("path", ["separate", "split", "whole", "overlap", "single"])
def test_an_adapter_on_f_b_leaves_every_path_whose_f_b_is_its_own(path):
    members = PLAIN | {"f_b_proj": Projection(dtype="bfloat16", adapter=True)}
    assert verdicts(K3, "kda", members)[path].ok


def test_another_step_never_takes_the_default_from_its_place():
    for step in (None, "cuda", "triton", "chain", "reference"):
        for deterministic in (False, True):
            kda = make_plan(K3, FusionConfig(), "bfloat16", step=step, deterministic=deterministic).kda
            assert (kda.path, kda.verdicts["whole"].ok) == ("whole", True)
    asked = FusionConfig(kda="deferred")
    assert make_plan(K3, asked, "bfloat16", step="cuda").kda.path == "deferred"
    # shapes without memory are planned for another machine, whose step nobody knows
    assert make_plan(K3, asked, "bfloat16", step="chain", device="meta").kda.path == "deferred"
    with pytest.raises(ValueError, match="fusion kda=deferred cannot be honoured: f_b inside the decode step needs"):
        make_plan(K3, asked, "bfloat16", step="chain")


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

    assert tuple(path_groups(K3, "kda")) == tuple(path_groups(KL, "kda")) == tuple(kda_paths(True)) == KDA_PATHS
    assert tuple(kda_paths(False)) == tuple(path for path in KDA_PATHS if path != "deferred")
    assert tuple(path_groups(K3, "mla")) == tuple(mla_paths(True)) == MLA_PATHS
