"""FusionConfig: repeated KIND=PATH options."""

import pytest

from anabranch.config import FusionConfig
from anabranch.config.fusion import KDA_PATHS, MLA_PATHS
from anabranch.fusion.kda_paths import KDA_FULL_RANK, KDA_LOW_RANK
from anabranch.fusion.mla_paths import MLA_GATED
from anabranch.fusion.plan import PREFERENCE


def test_nothing_asked_is_auto():
    assert FusionConfig.parse([]) == FusionConfig() == FusionConfig(kda="auto", mla="auto")


def test_a_table_of_measured_times_is_named_beside_the_kinds():
    assert FusionConfig.parse(["table=a=b.json"]) == FusionConfig(table="a=b.json")
    with pytest.raises(ValueError, match=r"nor table=FILE"):
        FusionConfig.parse(["table="])


def test_each_kind_is_set_on_its_own_and_the_last_wins():
    assert FusionConfig.parse(["kda=split"]) == FusionConfig(kda="split")
    assert FusionConfig.parse(["mla=merged", "kda=split", "kda=whole"]) == FusionConfig(kda="whole", mla="merged")


@pytest.mark.parametrize("item", ["kda", "kda=", "=split", "ffn=split", "", "KDA=split"])
def test_what_is_not_kind_equals_path(item):
    with pytest.raises(ValueError, match="is not KIND=PATH with KIND one of kda, mla"):
        FusionConfig.parse([item])


@pytest.mark.parametrize("item", ["kda=merged", "mla=whole", "kda=on", "mla=Merged"])
def test_an_unknown_path_lists_the_accepted_ones(item):
    with pytest.raises(ValueError, match=r"is unknown; accepted: auto, separate, ") as caught:
        FusionConfig.parse([item])
    assert item.split("=")[1] in str(caught.value)


def test_the_names_are_those_of_the_registry_and_the_plan():
    assert set(KDA_PATHS) == set(KDA_FULL_RANK) == {*KDA_LOW_RANK, "deferred"} > set(PREFERENCE["kda"])
    assert set(MLA_PATHS) == set(MLA_GATED) > set(PREFERENCE["mla"])
