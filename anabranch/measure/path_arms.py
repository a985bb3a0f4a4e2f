"""Projection paths of a whole model as arms: named like `fused` or `fused+merged`, put in place and taken back."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from anabranch.config.model import ModelConfig
from anabranch.fusion.kda_paths import kda_paths
from anabranch.fusion.mla_paths import mla_paths
from anabranch.fusion.plan import FusionPlan
from anabranch.fusion.prologue import Path
from anabranch.measure.subject import UNMEASURED, force, prologues

AUTO = "auto"
_MLA_BASE = "separate"


@dataclass(frozen=True, kw_only=True, slots=True)
class PathArm:
    """`kda` and `mla` None: what the plan chooses."""

    name: str
    kda: Path | None
    mla: Path | None


def parse_arm(text: str, config: ModelConfig, plan: FusionPlan) -> PathArm:
    """KDA, or KDA+MLA, or `auto`; MLA is `separate` where it is not named, so that one thing differs between arms.

    Raises:
        ValueError: an unknown path, or one that the rules refuse for this model, with the reason.
    """
    if text == AUTO:
        return PathArm(name=text, kda=None, mla=None)
    kda, _, mla = text.partition("+")
    found = {}
    for kind, name, known, choice in (
        ("kda", kda, kda_paths(config.kda.full_rank_gate), plan.kda),
        ("mla", mla or _MLA_BASE, mla_paths(config.mla.output_gate), plan.mla),
    ):
        if name not in known:
            raise ValueError(f"path {text!r}: {kind} accepts {', '.join(known)}; an arm is KDA, KDA+MLA or {AUTO}")
        if not choice.verdicts[name].ok:
            raise ValueError(f"path {text!r}: {kind}={name} cannot be honoured: {choice.verdicts[name].reason}")
        found[kind] = known[name]
    return PathArm(name=text, **found)


def all_arms(config: ModelConfig, plan: FusionPlan) -> list[str]:
    """`separate` first, every other legal KDA path beside the same MLA path, and the most merged pair."""
    legal = [n for n, verdict in plan.kda.verdicts.items() if verdict.ok and n not in UNMEASURED]
    names = sorted((n for n in legal if n in kda_paths(config.kda.full_rank_gate)), key=lambda n: n != _MLA_BASE)
    if config.mla.output_gate and "fused" in names:
        names.append("fused+merged")
    return names


class ModelPaths:
    """The prologues of a model, and what the plan gave them."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._modules = list(modules)
        self._own = [(p, p.choose) for kind in ("kda", "mla") for p in prologues(self._modules, kind)]

    def use(self, arm: PathArm) -> None:
        """From now on passes that are not replayed take this arm's paths."""
        self.restore()
        for kind, path in (("kda", arm.kda), ("mla", arm.mla)):
            if path is not None:
                force(prologues(self._modules, "kda" if kind == "kda" else "mla"), path)

    def restore(self) -> None:
        """Back to what the plan chooses."""
        for prologue, choose in self._own:
            prologue.choose = choose


def parse_arms(names: Sequence[str], config: ModelConfig, plan: FusionPlan) -> list[PathArm]:
    """As `parse_arm`; an arm twice is a ValueError."""
    if len(set(names)) < len(names):
        raise ValueError(f"paths {','.join(names)}: an arm is named twice")
    return [parse_arm(name, config, plan) for name in names]
