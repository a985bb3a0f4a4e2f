"""Chooses paths for each layer kind when the model is built: from the verdicts, the user's wish and measured times."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from anabranch.config.fusion import FusionConfig
from anabranch.config.model import LayerKind, ModelConfig
from anabranch.config.parallel import ParallelConfig
from anabranch.fusion.costs import Costs, CostTable, device_name, join_tables, read_table, shape_key, shipped_tables
from anabranch.fusion.rules import Layer, Step, Verdict, dequantized, resolve, verdicts_of_kind

# without measured times, fewest launches first: with one stream they win or tie almost everywhere (docs/fusions.md)
PREFERENCE = {"kda": ("whole", "split", "separate", "single"), "mla": ("merged", "separate", "single")}


@dataclass(frozen=True, slots=True)
class Moment:
    """When a prologue runs: the longest context of the pass lies in `least` .. `most` tokens; `graph` captures it."""

    least: int
    most: int
    graph: bool


EAGER = Moment(1, 1, False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """How one layer kind chooses: `path` where no measured time says otherwise, why, and the verdict on every path."""

    kind: str
    path: str
    reason: str
    verdicts: Mapping[str, Verdict]
    costs: Costs | None = None

    def pick(self, rows: int, moment: Moment) -> str:
        """The path for a pass of `rows` tokens. In a graph the answer is asked for once, at capture, and frozen."""
        return self.costs.pick(rows, moment.least, moment.most, moment.graph) if self.costs else self.path

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that `pick` may name."""
        return self.costs.paths if self.costs else (self.path,)


@dataclass(frozen=True, kw_only=True, slots=True)
class FusionPlan:
    """The choice for each layer kind that the model has, and how every layer holds its attention projections."""

    kda: Choice
    mla: Choice
    layers: tuple[Layer, ...]


def make_plan(
    config: ModelConfig,
    fusion: FusionConfig,
    dtype: str,
    *,
    parallel: ParallelConfig | None = None,
    device: torch.device | str | None = None,
    deterministic: bool = False,
    adapted: Collection[str] = (),
    step: str | None = None,
) -> FusionPlan:
    """Resolve `fusion` for this model.

    Args:
        parallel: this rank's place; without it measured times are not looked up.
        device: where the model will live; "meta" plans for the machine at hand, or for that of the table asked for.
        deterministic: whether batch-invariant operations, which have times of their own, will run.
        adapted: official names of the modules that carry a LoRA adapter.
        step: the implementation of `kda_step` that will run; "meta" asks about another machine's, which nobody knows.

    Raises:
        ValueError: an explicitly named path is refused by the rules, or a cost table that was asked for cannot be read
            or knows nothing about this device and model; the message carries the reason.
    """
    on = torch.device(device or "cpu")
    name, table = _table(fusion, on)
    decode = Step(name=None if on.type == "meta" else step, deterministic=deterministic)
    choices, covered = {}, False
    layers = resolve(config, parallel or ParallelConfig(), dtype, adapted)
    for kind in ("kda", "mla"):
        of_kind = [layer for layer, is_kind in zip(layers, config.layer_kinds, strict=True) if is_kind == kind]
        times = {}
        if table is not None and parallel is not None and _plain(of_kind):
            shape = shape_key(config, kind, parallel.attn_tp_size, dtype)
            times = table.select(kind, shape, deterministic)
        covered |= bool(times)
        known = f"no measured times for {name} and this shape" if parallel is not None else ""
        verdicts = verdicts_of_kind(config, kind, layers, decode)
        choice = choose(kind, getattr(fusion, kind), verdicts, times, name, known)
        choices[kind] = replace(choice, reason="; ".join(filter(None, (choice.reason, dequantized(of_kind)))))
    if fusion.table and parallel is not None and not covered and "auto" in (fusion.kda, fusion.mla):
        mode = "deterministic" if deterministic else "normal"
        raise ValueError(f"cost table {fusion.table}: nothing about {name}, this model's shapes and {mode} mode")
    return FusionPlan(**choices, layers=layers)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What `auto` takes for one layer kind on one device in one mode, by measured times."""

    device: str
    deterministic: bool
    source: str
    choice: Choice


def explain(config: ModelConfig, fusion: FusionConfig, dtype: str, parallel: ParallelConfig) -> Iterator[Measured]:
    """Everything that the table asked for, or else the shipped ones, say about this model and layout."""
    tables = [read_table(Path(fusion.table))] if fusion.table else shipped_tables()
    layers = resolve(config, parallel, dtype)
    kinds: list[LayerKind] = [kind for kind in ("kda", "mla") if kind in config.layer_kinds]
    for device in dict.fromkeys(table.device for table in tables):
        table = join_tables(tables, device)
        assert table is not None
        for deterministic in (False, True):
            for kind in kinds:
                times = table.select(kind, shape_key(config, kind, parallel.attn_tp_size, dtype), deterministic)
                verdicts = verdicts_of_kind(config, kind, layers, Step(deterministic=deterministic))
                choice = choose(kind, "auto", verdicts, times, device)
                if choice.costs and _plain(layers):
                    yield Measured(device=device, deterministic=deterministic, source=table.source, choice=choice)


def _plain(layers: Sequence[Layer]) -> bool:
    """Tables are measured on plain weights; others have other times."""
    return all(m.quantization is None and not m.adapter for layer in layers for m in layer.values())


def _table(fusion: FusionConfig, device: torch.device) -> tuple[str, CostTable | None]:
    """The device's name, and what is known about it."""
    name = device_name(device)
    if fusion.table is None:
        return name, join_tables(shipped_tables(), name)
    table = read_table(Path(fusion.table))
    if device.type == "meta":
        name = table.device
    return name, table if table.device == name else None


def choose(
    kind: LayerKind, wish: str, verdicts: Mapping[str, Verdict], times: Mapping, device: str = "", unknown: str = ""
) -> Choice:
    """One kind's choice; `times` are the measured cells of its shape, `unknown` says that there are none."""
    if wish != "auto":
        if not verdicts[wish].ok:
            raise ValueError(f"fusion {kind}={wish} cannot be honoured: {verdicts[wish].reason}")
        return Choice(kind=kind, path=wish, reason="asked for", verdicts=verdicts)
    path = next((p for p in PREFERENCE[kind] if verdicts[p].ok), None)
    assert path is not None, f"{kind}: a path that merges nothing must always be allowed"
    refused = [f"{p}: {verdicts[p].reason}" for p in PREFERENCE[kind][: PREFERENCE[kind].index(path)]]
    legal = [p for p, verdict in verdicts.items() if verdict.ok]
    costs = Costs(times, path, legal)
    if costs:
        reason = "; ".join([f"auto, measured on {device}: {costs.summary()}", *refused])
        return Choice(kind=kind, path=path, reason=reason, verdicts=verdicts, costs=costs)
    parts = ["auto, fewest GEMMs allowed", *refused, *([unknown] if unknown else [])]
    return Choice(kind=kind, path=path, reason="; ".join(parts), verdicts=verdicts)
