"""What is measured: attention layers of a model at the widths of one rank, with random weights, and decode batches."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path as FilePath
from typing import TypeVar

import torch
from torch import nn

from anabranch.config.fusion import FusionConfig
from anabranch.config.hf import load_model_config
from anabranch.config.model import LayerKind, ModelConfig
from anabranch.engine.cache import PAGE, Cache, CacheShape, pages_for
from anabranch.fusion.kda_paths import kda_paths
from anabranch.fusion.mla_paths import mla_paths
from anabranch.fusion.plan import Moment, make_plan
from anabranch.fusion.prologue import Path, Prologue
from anabranch.layers.batch import Batch, LayerCache
from anabranch.layers.build import Build
from anabranch.layers.kda import KdaLayer
from anabranch.layers.linear import RMSNorm
from anabranch.layers.mla import MlaLayer
from anabranch.models.load import device_of, dtype_of
from anabranch.ops.registry import Selection, select
from anabranch.ops.segments import Segments
from anabranch.parallel.collectives import SingleRank
from anabranch.parallel.layout import Layout

Module = TypeVar("Module", bound=nn.Module)

COLD_BYTES = 400 << 20  # weight sets rotate over more than six times the L2 of an H200
CHAIN: tuple[LayerKind, ...] = ("kda", "kda", "kda", "mla")  # how both models alternate

# for a layer that carries an adapter: the GEMMs of `separate` and more, so it is never the fastest
UNMEASURED = ("single",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """A rank of a model on a device, its attention weights plain; collectives are those of a single rank."""

    config: ModelConfig
    build: Build
    selection: Selection
    deterministic: bool

    @classmethod
    def of(
        cls,
        config: ModelConfig,
        layout: Layout,
        device: torch.device,
        dtype: torch.dtype,
        *,
        deterministic: bool = False,
        ops: Mapping[str, str] | None = None,
    ) -> "Subject":
        """The first rank of `layout`, cut down to four attention layers.

        Raises:
            ValueError: heads do not divide over the ranks, or an operation cannot run here.
        """
        config = replace(config, layer_kinds=CHAIN, moe_layers=(False,) * len(CHAIN), fp8=())
        name = str(dtype).removeprefix("torch.")
        selection = select(config, device, dtype=dtype, deterministic=deterministic, wishes=ops)
        build = Build(
            config=config,
            parallel=layout.rank(0),
            plan=make_plan(
                config,
                FusionConfig(),
                name,
                parallel=layout.rank(0),
                deterministic=deterministic,
                step=selection.chosen["kda_step"][0],
            ),
            ops=selection.ops,
            comm=SingleRank(),
            dtype=dtype,
            device=device,
        )
        return cls(config=config, build=build, selection=selection, deterministic=deterministic)

    @classmethod
    def open(
        cls,
        path: FilePath,
        *,
        layout: Layout,
        device: str = "auto",
        dtype: str = "auto",
        deterministic: bool = False,
        ops: Mapping[str, str] | None = None,
    ) -> "Subject":
        """From a config.json or the directory that holds it; nothing else is read.

        Raises:
            ValueError: an unusable config, device, dtype or layout.
        """
        config, on = load_model_config(path), device_of(device)
        layout.check(config)
        made_as = dtype_of(dtype, config.dtype, on)
        return cls.of(config, layout, on, made_as, deterministic=deterministic, ops=ops)

    @property
    def device(self) -> torch.device:
        return torch.device(self.build.device or "cpu")

    def layer(self, kind: LayerKind) -> KdaLayer | MlaLayer:
        """A new layer with random weights of plausible size."""
        layer = (KdaLayer if kind == "kda" else MlaLayer)(self.build)
        _fill(layer)
        return layer

    def chain(self) -> "Chain":
        """A new chain of four layers with random weights."""
        chain = Chain(self)
        _fill(chain)
        return chain

    def paths(self, kind: LayerKind) -> dict[str, Path]:
        """The paths of a layer kind that are allowed here and worth measuring, by name."""
        config, verdicts = self.config, getattr(self.build.plan, kind).verdicts
        known = kda_paths(config.kda.full_rank_gate) if kind == "kda" else mla_paths(config.mla.output_gate)
        return {name: path for name, path in known.items() if name not in UNMEASURED and verdicts[name].ok}

    def default(self, kind: LayerKind) -> str:
        """The path that is taken where nothing was measured."""
        return getattr(self.build.plan, kind).path

    def hidden(self, rows: int) -> torch.Tensor:
        """Random input [rows, hidden]."""
        return torch.randn(rows, self.config.hidden_size, device=self.device, dtype=self.build.dtype)


def prologues(modules: Iterable[nn.Module], kind: LayerKind) -> list[Prologue]:
    """The prologues of every layer of this kind inside `modules`."""
    of_kind = KdaLayer if kind == "kda" else MlaLayer
    return [layer.prologue for module in modules for layer in module.modules() if isinstance(layer, of_kind)]


def force(prologues: Iterable[Prologue], path: Path) -> None:
    """From now on these prologues take `path`, whatever the plan says."""

    def choose(rows: int, moment: Moment) -> Path:
        return path

    for prologue in prologues:
        prologue.choose = choose


class Chain(nn.Module):
    """Three KDA layers and an MLA layer, each x + Attn(norm x): the neighbours a projection path has in a model.

    Without FFN: its weights would be most of the time and of the memory, and no path touches it.
    """

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        hidden = subject.config.hidden_size
        self.norms = nn.ModuleList(RMSNorm(subject.build, hidden) for _ in CHAIN)
        self.layers = nn.ModuleList((KdaLayer if k == "kda" else MlaLayer)(subject.build) for k in CHAIN)

    def forward(self, x: torch.Tensor, batch: Batch, caches: list[LayerCache]) -> torch.Tensor:
        for norm, layer, cache in zip(self.norms, self.layers, caches, strict=True):
            x = x + layer(norm(x), batch, cache)
        return x


def cold(make: Callable[[], Module]) -> list[Module]:
    """As many modules as rotate over COLD_BYTES of weights, so that each is out of the cache when its turn comes."""
    modules = [make()]
    size = sum(p.numel() * p.element_size() for p in modules[0].parameters())
    if next(modules[0].parameters()).is_cuda:
        modules += [make() for _ in range(COLD_BYTES // size)]
    return modules


class Decodes:
    """Decode batches of up to `rows` requests, each with pages of its own, and at most `tokens` latent rows in all."""

    def __init__(self, subject: Subject, rows: int, tokens: int) -> None:
        self.subject, config = subject, subject.config
        shape = CacheShape.of(config, subject.build.parallel, subject.build.dtype)
        self.cache = Cache(
            config,
            subject.build.parallel,
            shape,
            slots=rows,
            pages=max(rows, pages_for(tokens) + rows),
            device=subject.device,
        )
        for layer in self.cache.layers:
            getattr(layer, "pages", torch.empty(0)).normal_()

    def batch(self, rows: int, context: int, graph: bool) -> Batch:
        """`rows` requests that each compute their token number `context`."""
        device, pages = self.subject.device, pages_for(context)
        table = torch.arange(rows * pages, device=device).view(rows, pages)
        index = torch.arange(rows, device=device)
        return Batch(
            tokens=torch.zeros(rows, dtype=torch.int64, device=device),
            segments=Segments.of([1] * rows, [context] * rows, device),
            prefill=Segments.of([], [], device),
            decodes=rows,
            slots=index,
            block_table=table,
            rows=table[:, -1] * PAGE + (context - 1) % PAGE,
            wanted=index,
            moment=Moment(context, context, graph),
        )


def latent_bytes(subject: Subject, rows: int, context: int) -> int:
    """What one attention pass over `rows` contexts must read of the latent cache."""
    return rows * context * subject.config.mla.latent_dim * subject.build.dtype.itemsize


def _fill(module: nn.Module) -> None:
    # the state dict names merged buffers by their segments, so pad rows stay zero
    for name, p in module.state_dict().items():
        if name.endswith("A_log"):
            p.uniform_(1, 16).log_()
        elif p.dim() > 1:
            p.normal_(std=p.shape[-1] ** -0.5)
        elif "norm" in name:
            p.fill_(1)
        else:
            p.normal_(std=0.5)
