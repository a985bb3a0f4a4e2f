"""What a comparison is asked to do: a TOML file as frozen dataclasses, every unknown key an error."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar

from anabranch.evidence.client import BACKENDS, ClientSpec
from anabranch.evidence.load import LoadSpec
from anabranch.evidence.metrics import metric_named, parse_goodput
from anabranch.evidence.workload import WorkloadSpec

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class ArmSpec:
    """One arm: a command that starts a server, or the URL of a running one.

    In `command`, `{port}` and `{run_dir}` are filled in. `caches` names environment variables whose folder is copied
    from a baseline for each run. `expect` asserts counters, such as {"num_preemptions" = "0", "kda.whole" = ">0"}.
    `changes` lists what the arm changes; a difference of several changes belongs to all of them together.
    """

    name: str
    command: str | None = None
    url: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    caches: Mapping[str, str] = field(default_factory=dict)
    expect: Mapping[str, str] = field(default_factory=dict)
    changes: tuple[str, ...] = ()
    health: str = "/health"
    port: int = 0
    start_timeout_s: float = 600.0
    stop_timeout_s: float = 30.0
    repo: str | None = None

    def __post_init__(self) -> None:
        if (self.command is None) == (self.url is None):
            raise ValueError(f"arm {self.name!r}: need exactly one of command and url")
        if self.name in ("", "control") or not self.name.replace("-", "").replace("_", "").isalnum():
            raise ValueError(f"arm {self.name!r}: need a name of letters, digits, - and _, other than 'control'")
        if self.command is not None and "{port}" not in self.command and not self.port:
            raise ValueError(f"arm {self.name!r}: need {{port}} in command, or port")


@dataclass(frozen=True, kw_only=True)
class ScheduleSpec:
    """`control` A/A pairs first, then `pairs` A/B pairs; ABBA turns every second pair round against drift."""

    pairs: int = 3
    control: int = 2
    order: str = "ABAB"
    warmups: int = 4
    settle_s: float = 0.0

    def __post_init__(self) -> None:
        if self.pairs < 1 or self.control < 0 or self.warmups < 0 or self.settle_s < 0:
            raise ValueError("schedule: need pairs >= 1; control, warmups and settle_s >= 0")
        if self.order not in ("ABAB", "ABBA"):
            raise ValueError(f"order={self.order!r}: accepted are ABAB, ABBA")


@dataclass(frozen=True, kw_only=True)
class CompareSpec:
    """Which metrics are judged; the first is the primary one. `confidence` holds for all of them together."""

    metrics: tuple[str, ...] = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
    percentiles: tuple[float, ...] = (90, 99)
    goodput: tuple[str, ...] = ()
    confidence: float = 0.99
    allow_cached: bool = False

    def __post_init__(self) -> None:
        if not self.metrics:
            raise ValueError("compare.metrics is empty: need at least one metric")
        for name in self.metrics:
            metric_named(name)
            if name[0] == "p" and name[1:3].isdecimal() and int(name[1:3]) not in self.percentiles:
                raise ValueError(f"metric {name!r}: need {name[1:3]} in compare.percentiles")
        if not 0.5 <= self.confidence < 1:
            raise ValueError(f"confidence={self.confidence}: need 0.5 <= c < 1")
        parse_goodput(self.goodput)


@dataclass(frozen=True, kw_only=True)
class ExactSpec:
    """Fixed inputs whose greedy answers are compared token by token.

    `prompts` inputs of `input_len` ids give `tokens` tokens each, one after the other; with `chunk` C, inputs of 1024,
    C-1, C, C+1, 2C and 4C ids give `chunk_tokens`, each twice; `concurrent` inputs are sent all at once. In a
    comparison the first `pairs` pairs ask them.
    """

    prompts: int = 32
    input_len: int = 128
    tokens: int = 64
    chunk: int | None = None
    chunk_tokens: int = 16
    concurrent: int = 0
    pairs: int = 2
    seed: int = 20

    def __post_init__(self) -> None:
        for name in ("input_len", "tokens", "chunk_tokens", "pairs"):
            if getattr(self, name) < 1:
                raise ValueError(f"exact.{name}={getattr(self, name)}: need at least 1")
        if self.prompts < 0 or self.concurrent < 0:
            raise ValueError("exact: need prompts and concurrent >= 0")
        if not (self.prompts or self.concurrent or self.chunk):
            raise ValueError("exact asks nothing: need prompts, concurrent or chunk")
        if self.chunk is not None and self.chunk < 2:
            raise ValueError(f"exact.chunk={self.chunk}: need at least 2")


@dataclass(frozen=True, kw_only=True)
class Spec:
    """A whole comparison. `prepare` are commands that run once before the first server starts."""

    title: str
    a: ArmSpec
    b: ArmSpec
    workload: WorkloadSpec
    load: LoadSpec
    client: Mapping[str, Any]
    prepare: tuple[str, ...] = ()
    schedule: ScheduleSpec = ScheduleSpec()
    compare: CompareSpec = CompareSpec()
    exact: ExactSpec | None = None

    @property
    def arms(self) -> tuple[ArmSpec, ArmSpec]:
        """A, the baseline, and B."""
        return self.a, self.b

    def client_of(self, url: str, **changes: Any) -> ClientSpec:
        """How to speak to a server of this comparison."""
        return ClientSpec(base_url=url, **{**self.client, **changes})


def parse_spec(text: str, where: str = "spec", folder: Path | None = None) -> Spec:
    """From TOML; `folder` is what relative paths of files are relative to.

    Raises:
        ValueError: no TOML, an unknown key, or a value that is not accepted.
    """
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where}: no TOML: {error}") from None
    try:
        return _spec(table, folder or Path())
    except (ValueError, TypeError) as error:
        raise ValueError(f"{where}: {error}") from None


def _spec(table: Mapping[str, Any], folder: Path) -> Spec:
    _known(table, {"title", "prepare", "arms", "client", "load", "schedule", "compare", "exact"}, "the file")
    arms = table.get("arms", {})
    if len(arms) != 2:
        raise ValueError(f"{len(arms)} arms: need exactly two, the first is the baseline A")
    a, b = (_make(ArmSpec, {**arm, "name": name}, f"arms.{name}") for name, arm in arms.items())
    given = dict(table.get("load", {}))
    if "dataset_path" in given:
        given["dataset_path"] = folder / given["dataset_path"]
    named = {f.name for kind in (WorkloadSpec, LoadSpec) for f in fields(kind)}
    _known(given, named, "load")
    workload, load = ({k: v for k, v in given.items() if k in _names(kind)} for kind in (WorkloadSpec, LoadSpec))
    client = dict(table.get("client", {}))
    _known(client, _names(ClientSpec) - {"base_url", "logprobs", "stop"}, "client")
    if client.get("backend", "openai") not in BACKENDS:
        raise ValueError(f"client.backend={client['backend']!r}: accepted are {', '.join(BACKENDS)}")
    return Spec(
        title=table.get("title", f"{b.name} against {a.name}"),
        a=a,
        b=b,
        workload=WorkloadSpec(**workload),
        load=LoadSpec(**load),
        client=client,
        prepare=tuple(table.get("prepare", ())),
        schedule=_make(ScheduleSpec, table.get("schedule", {}), "schedule"),
        compare=_make(CompareSpec, table.get("compare", {}), "compare"),
        exact=_make(ExactSpec, table["exact"], "exact") if "exact" in table else None,
    )


def _make(kind: type[T], table: Mapping[str, Any], where: str) -> T:
    _known(table, _names(kind), where)
    return kind(**{name: tuple(value) if isinstance(value, list) else value for name, value in table.items()})


def _names(kind: type) -> set[str]:
    return {f.name for f in fields(kind)}


def _known(table: Mapping[str, Any], names: set[str], where: str) -> None:
    if unknown := sorted(set(table) - names):
        raise ValueError(f"{where} has the key {unknown[0]!r}: accepted are {', '.join(sorted(names))}")
