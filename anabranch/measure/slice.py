"""One rank's aligned four-layer slice of a model in decode: three KDA layers and an MLA layer with their FFNs.

Real layers at the widths of one rank, from the middle of the model, with the residual stream that they find there. What
other ranks do is simulated as `simulated_peers` says; a slice ends where it began, with an update that the next norm
adds.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from anabranch.config.model import ModelConfig
from anabranch.engine.cache import Cache
from anabranch.fusion.plan import Moment
from anabranch.layers.batch import KdaState
from anabranch.layers.build import Build
from anabranch.layers.residual import Stream
from anabranch.measure.gate import BLOCK_EQUALITY, GateRedError
from anabranch.measure.path_arms import ModelPaths, PathArm, parse_arms
from anabranch.measure.simulated_peers import Exchange, SimulatedPeers
from anabranch.measure.subject import CHAIN, Decodes, Subject
from anabranch.measure.timing import COPY_BYTES_PER_S, READ_BYTES_PER_S, floor_us
from anabranch.measure.touched import Touched, noting_experts, weight_bytes
from anabranch.models.dummy import load_dummy
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.kda_decode.spec import floor as state_floor
from anabranch.parallel.layout import Layout


@dataclass(frozen=True, slots=True)
class Ended:
    """Where a slice leaves the stream: the sum, and the update that it still lacks."""

    prefix: torch.Tensor
    pending: torch.Tensor


class Slice:
    """The layers, their caches and one decode batch on the first rank of `layout`.

    Args:
        rows: requests of this rank's attention replica; the router sees those of all replicas.
        context: tokens of each request, the one computed included.

    Raises:
        ValueError: the model has no such slice behind its dense layers, or the layout does not fit it.
    """

    def __init__(
        self,
        config: ModelConfig,
        layout: Layout,
        *,
        device: torch.device,
        dtype: torch.dtype,
        rows: int = 32,
        context: int = 1024,
        deterministic: bool = False,
        ops: Mapping[str, str] | None = None,
        seed: int = 0,
    ) -> None:
        layout.check(config)
        config, stages, stage = _cut(config)
        place = replace(layout, pp=stages).rank(stage * layout.tp)
        self.config, self.rows, self.context, self.device = config, rows, context, device
        self.peers = SimulatedPeers(place)
        self.model = KimiForCausalLM(
            config,
            parallel=place,
            comm=self.peers,
            dtype=dtype,
            device=device,
            deterministic=deterministic,
            ops=ops,
        ).eval()
        load_dummy(self.model, seed)
        self.paths = ModelPaths([self.model])
        build = Build(config=config, parallel=place, plan=self.model.plan, ops=self.model.ops, comm=self.peers,
                      dtype=dtype, device=device)  # fmt: skip
        subject = Subject(
            config=config, build=build, selection=self.model.selection, deterministic=self.model.deterministic
        )
        decodes = Decodes(subject, rows, rows * context)
        self.cache: Cache = decodes.cache
        batch = decodes.batch(rows, context, True)
        counts = (rows,) * place.dp_size if place.dp_size > 1 else None
        self.batch = replace(batch, counts=counts, moment=Moment(context, context, device.type == "cuda"))
        for state in self._states():
            state.normal_(std=0.1)
        self._start = [state.clone() for state in self._states()]
        self.inputs = Ended(subject.hidden(rows), subject.hidden(rows))
        self.bank = [subject.hidden(rows) for _ in range(self.model.model.banked)]

    @property
    def layers(self) -> range:
        """Numbers of the layers in the model, from 0."""
        return self.model.model.stage

    def arms(self, names: Sequence[str]) -> list[PathArm]:
        """ValueError as in `parse_arm`."""
        return parse_arms(names, self.config, self.model.plan)

    def run(self, count: int = 1) -> Ended:
        """`count` slices one behind the other, each where the last one left the stream."""
        at = self.inputs
        for _ in range(count):
            self.peers.begin()
            stream = Stream(at.prefix, list(self.bank), at.pending)
            for layer, cache in zip(self.model.model.layers.values(), self.cache.layers, strict=True):
                layer(stream, self.batch, cache)
            assert stream.prefix is not None
            assert stream.pending is not None
            at = Ended(stream.prefix, stream.pending)
        return at

    def exchanges(self) -> list[Exchange]:
        """The collectives of one slice, which were not executed: those of the last run."""
        return list(self.peers.noted)

    def rewind(self) -> None:
        """States as they were at first."""
        for state, start in zip(self._states(), self._start, strict=True):
            state.copy_(start)

    def check_states(self) -> None:
        """GateRedError where a state is not finite."""
        if not all(state.isfinite().all() for state in self._states()):
            raise GateRedError("slice: a recurrent state is not finite")

    def check(self, arms: Sequence[PathArm]) -> dict[str, str]:
        """Every arm's attention layers against the first arm's, inputs and states alike: "bitwise" or the class.

        Whole slices are not compared: a last bit may choose another expert, which is no fault of a path.

        Raises:
            GateRedError: outputs or new states differ by more than the class allows.
        """
        alike = dict.fromkeys((arm.name for arm in arms), True)
        for number, layer in self.model.model.layers.items():
            at, base = self.layers.index(int(number)), None
            x = torch.randn_like(self.inputs.prefix)
            for arm in arms:
                self.rewind()
                self.paths.use(arm)
                attention: Any = layer.self_attn
                # the copy is a plain launch between what the states were given and a step's early reads of them
                found = [attention(x.clone(), self.batch, self.cache.layers[at]).clone()]
                cache = self.cache.layers[at]
                found += [cache.state.to(x.dtype)] if isinstance(cache, KdaState) else []
                base = base or found
                alike[arm.name] &= _compare(found, base, f"layer {number}, {arm.name}")
        self.rewind()
        self.paths.restore()
        return {name: "bitwise" if same else BLOCK_EQUALITY.kind for name, same in alike.items()}

    def touched(self) -> Touched:
        """The experts of one slice, by the router's choices."""
        with noting_experts(self.model.model.layers) as seen:
            self.run()
        self.rewind()
        return seen

    def floor(self, touched: Touched) -> tuple[float, float]:
        """(bytes that must move, us): weights and latent rows at the read rate, states at the copy rate of an H200."""
        parallel, kda = self.model.parallel, self.config.kda
        reads = weight_bytes(self.model.model.layers, touched)
        reads += self.rows * self.context * self.cache.shape.bytes_per_token
        itemsize = self.cache.shape.state_dtype.itemsize
        state = (
            CHAIN.count("kda")
            * state_floor(self.rows, kda.heads // parallel.attn_tp_size, kda.head_dim, itemsize).bytes
        )
        us = floor_us(reads, bytes_per_s=READ_BYTES_PER_S) + floor_us(state, bytes_per_s=COPY_BYTES_PER_S)
        return reads + state, us

    def case(self, touched: Touched) -> dict[str, Any]:
        """What a result row says about the subject."""
        place = self.model.parallel
        sizes = {"tp": place.tp_size, "attention_tp": place.attn_tp_size, "ep": place.ep_size}
        return {
            "architecture": self.config.architecture,
            **sizes,
            "layers": list(self.layers),
            "rows": self.rows,
            "router_rows": self.rows * place.dp_size,
            "context": self.context,
            "banked_sums": len(self.bank),
            "experts": self.config.expert_format,
            "experts_touched": round(touched.experts_mean, 2),
            "choices_here": round(touched.choices_mean, 1),
            "dtype": str(self.model.dtype).removeprefix("torch."),
        }

    def _states(self) -> list[torch.Tensor]:
        return [t for c in self.cache.layers if isinstance(c, KdaState) for t in (c.conv, c.state)]


def _cut(config: ModelConfig) -> tuple[ModelConfig, int, int]:
    """The config down to whole slices, their number, and the middle one, which as a pipeline stage is the slice."""
    width = len(CHAIN)
    stages = next(
        (i for i in range(config.layers // width) if config.layer_kinds[i * width : (i + 1) * width] != CHAIN),
        config.layers // width,
    )
    stage = stages // 2
    if not stages or not all(config.moe_layers[stage * width : (stage + 1) * width]):
        raise ValueError(f"layers={config.layers}: no slice {'-'.join(CHAIN)} whose FFNs are all experts in the middle")
    last = stages * width
    kinds, moe = config.layer_kinds[:last], config.moe_layers[:last]
    return replace(config, layer_kinds=kinds, moe_layers=moe), stages, stage


def _compare(found: Sequence[torch.Tensor], base: Sequence[torch.Tensor], what: str) -> bool:
    """Whether all bits are equal."""
    for name, got, want in zip(("output", "state"), found, base, strict=False):
        try:
            BLOCK_EQUALITY.check(got, want, f"{what}, {name}")
        except AssertionError as error:
            raise GateRedError(str(error)) from None
        if not got.isfinite().all():
            raise GateRedError(f"{what}, {name}: not finite")
    return all(torch.equal(got, want) for got, want in zip(found, base, strict=True))
