"""Chooses a path for each layer kind: once, when the model is built, from the verdicts and the user's wish."""

from collections.abc import Mapping
from dataclasses import dataclass

from anabranch.config.fusion import FusionConfig
from anabranch.config.model import ModelConfig
from anabranch.fusion.rules import Verdict, plain_projections, verdicts

# fewest launches first: with one stream the fewest GEMMs win or tie at every row count (docs/fusions.md)
PREFERENCE = {"kda": ("whole", "split", "separate"), "mla": ("merged", "separate")}


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """The path of one layer kind, why it was taken, and the verdict on every path."""

    kind: str
    path: str
    reason: str
    verdicts: Mapping[str, Verdict]


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionPlan:
    """The choice for each layer kind that the model has."""

    kda: Choice
    mla: Choice


def make_plan(config: ModelConfig, fusion: FusionConfig, dtype: str) -> FusionPlan:
    """Resolve `fusion` for this model.

    Raises:
        ValueError: an explicitly named path is refused by the rules; the message carries their reason.
    """
    return FusionPlan(
        **{
            kind: _choose(kind, getattr(fusion, kind), verdicts(config, kind, plain_projections(config, kind, dtype)))
            for kind in ("kda", "mla")
        }
    )


def _choose(kind: str, wish: str, verdicts: Mapping[str, Verdict]) -> Choice:
    if wish != "auto":
        if not verdicts[wish].ok:
            raise ValueError(f"fusion {kind}={wish} cannot be honoured: {verdicts[wish].reason}")
        return Choice(kind=kind, path=wish, reason="asked for", verdicts=verdicts)
    for path in PREFERENCE[kind]:
        if verdicts[path].ok:
            refused = [f"{p}: {verdicts[p].reason}" for p in PREFERENCE[kind][: PREFERENCE[kind].index(path)]]
            return Choice(
                kind=kind, path=path, reason="; ".join(["auto, fewest GEMMs allowed", *refused]), verdicts=verdicts
            )
    raise AssertionError(f"{kind}: the separate path must always be allowed")
