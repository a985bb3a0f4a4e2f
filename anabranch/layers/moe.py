"""The mixture-of-experts FFN: router, routed experts (plain or MXFP4, latent or not), shared experts."""

import torch
from torch import nn

from anabranch.fusion import counters
from anabranch.layers.batch import Batch
from anabranch.layers.build import Build
from anabranch.layers.experts import Mxfp4Experts, PlainExperts
from anabranch.layers.linear import Linear, RMSNorm, frozen
from anabranch.layers.load import ExpertLoad
from anabranch.layers.mlp import Mlp
from anabranch.ops.router.plan import NORMED_TOKENS, scratch_words
from anabranch.parallel.exchange import Traffic, combine, dispatch

Routing = tuple[torch.Tensor, torch.Tensor]  # weights and experts of each token


class Router(nn.Module):
    """Router weight [E, hidden] in the model dtype and correction bias [E] in fp32."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        assert build.config.moe is not None
        self.moe, self.ops = build.config.moe, build.ops
        self.weight = frozen(self.moe.experts, build.config.hidden_size, dtype=build.dtype, device=build.device)
        self.e_score_correction_bias = frozen(self.moe.experts, dtype=torch.float32, device=build.device)
        # is zero between launches; not a buffer, as those are planned and loaded like weights
        words = scratch_words(self.moe.experts)
        self.scratch = (torch.zeros(words, dtype=torch.int32, device=build.device),)

    def forward(self, x: torch.Tensor, made: Routing | None = None) -> Routing:
        """The choice for x, or the one that was `made` with its norm: whoever watches the router sees every choice."""
        if made is not None:
            return made
        return self.ops.route(x, self.weight, self.e_score_correction_bias, self.moe, *self.scratch)

    def norms(self, rows: int) -> bool:
        """Whether `normed` takes so many rows."""
        return self.ops.norm_route is not None and 1 <= rows <= NORMED_TOKENS

    def normed(
        self, norm: RMSNorm, x: torch.Tensor, update: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, Routing]:
        """x + update, its norm and the choice for that, in one launch."""
        assert self.ops.norm_route is not None
        counters.add("moe.norm_route")
        own = (self.weight, self.e_score_correction_bias, self.moe, *self.scratch)
        total, y, *routing = self.ops.norm_route(x, update, norm.weight, norm.eps, *own)
        return total, y, (routing[0], routing[1])


class MoeFfn(nn.Module):
    """Routed plus shared experts, complete over the tp group (model_spec section 6.3)."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        assert build.config.moe is not None
        moe, hidden = build.config.moe, build.config.hidden_size
        self.moe, self.activation, self.ops, self.comm = moe, build.config.activation, build.ops, build.comm
        self.load = ExpertLoad(build) if build.count_experts else None
        self.traffic = _traffic(build)
        self.gate = Router(build)
        self.experts = (Mxfp4Experts if build.config.expert_format == "mxfp4" else PlainExperts)(build)
        if moe.shared_experts:
            self.shared_experts = Mlp(build, moe.intermediate_size * moe.shared_experts)
        if moe.latent_size:
            self.routed_expert_down_proj = Linear(build, hidden, moe.latent_size)
            self.routed_expert_up_proj = Linear(build, moe.latent_size, hidden)
            if moe.latent_norm:
                self.routed_expert_norm = RMSNorm(build, moe.latent_size)

    def forward(self, x: torch.Tensor, batch: Batch, routing: Routing | None = None) -> torch.Tensor:
        """x [T, hidden] -> [T, hidden]. The experts see the rows of all attention replicas.

        `routing`: the router's choice for x, where it was made with the norm; of one replica only.
        """
        if self.traffic is not None and self.traffic.prefers_all_to_all(batch.counts, batch.moment.graph):
            counters.add("moe.all_to_all")
            return self._joined(*self._visited(x, batch, self.traffic))
        x = self.comm.gather_rows(x, batch.counts)
        choice: Routing = self.gate(x, routing)  # reads the full width, also for latent experts
        if self.load is not None:
            self.load.note(choice[1], batch)
        z = self.routed_expert_down_proj(x) if self.moe.latent_size else None
        run = self._separate if self.ops.expert_ffn is None else self._together
        # the latent sum must be complete before its norm, so one collective carries both partial sums
        y = self.comm.sum_rows(run(x, choice, z), batch.counts)
        return self._joined(*y.split([self.moe.latent_size, x.shape[-1]], -1)) if self.moe.latent_size else y

    def _joined(self, routed: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
        """The sum of both parts, each complete: [T, hidden], or routed [T, latent]."""
        if self.moe.latent_size:
            if self.moe.latent_norm:
                routed = self.routed_expert_norm(routed)
            routed = self.routed_expert_up_proj(routed)
        return routed + shared

    def _visited(self, x: torch.Tensor, batch: Batch, traffic: Traffic) -> tuple[torch.Tensor, torch.Tensor]:
        """Both parts of own rows, which visit the ranks of their experts; the shared experts come to them."""
        routing = self.gate(x)
        if self.load is not None:
            self.load.note(routing[1], batch)
        z = self.routed_expert_down_proj(x) if self.moe.latent_size else x
        guests = dispatch(self.comm, z, *routing, ranks=traffic.ranks, total=traffic.experts)
        made = guests.rows  # no row, nothing to launch
        if len(made):
            seen = (guests.rows, guests.weights, guests.experts)
            made = self.ops.routed_experts(*seen, self.experts, self.activation).to(x.dtype)
        return combine(self.comm, guests, made), self._shared(x)

    def _shared(self, x: torch.Tensor) -> torch.Tensor:
        """The shared experts over own rows, with the matrices of all ranks."""
        if not self.moe.shared_experts:
            return torch.zeros_like(x)
        gate_up, down = self.shared_experts.matrices
        gate_up = self.comm.all_gather(gate_up.unflatten(0, (2, -1)).mT, "tp").mT.flatten(0, 1)
        hidden = self.ops.glu(self.ops.linear(x, gate_up), self.activation)
        return self.ops.linear(hidden, self.comm.all_gather(down, "tp"))

    def _together(self, x: torch.Tensor, routing: Routing, z: torch.Tensor | None) -> torch.Tensor:
        """This rank's part of routed + shared, or of routed | shared where the experts are latent."""
        shared = self.shared_experts.matrices if self.moe.shared_experts else None
        assert self.ops.expert_ffn is not None
        return self.ops.expert_ffn(x, *routing, self.experts, self.activation, shared, self.ops.linear, latent=z)

    def _separate(self, x: torch.Tensor, routing: Routing, z: torch.Tensor | None) -> torch.Tensor:
        """The same, an operation at a time."""
        read = x if z is None else z
        routed = self.ops.routed_experts(read, *routing, self.experts, self.activation).to(x.dtype)
        shared = self.shared_experts.partial(x) if self.moe.shared_experts else torch.zeros_like(x)
        return routed + shared if z is None else torch.cat([routed, shared], -1)


def _traffic(build: Build) -> Traffic | None:
    """What this layer's exchange costs, if every rank has rows and whole experts of its own, and sums may vary."""
    moe, place, size = build.config.moe, build.parallel, build.dtype.itemsize
    assert moe is not None
    if not 1 < place.tp_size == place.dp_size == place.ep_size or build.comm.ordered:
        return None
    hidden, width = build.config.hidden_size, moe.latent_size or build.config.hidden_size
    return Traffic(
        ranks=place.tp_size,
        experts=moe.experts,
        chosen=moe.top_k,
        gathered=hidden * size,
        summed=(hidden + (moe.latent_size or 0)) * size,
        there=width * size,
        back=width * size,
        shared=3 * hidden * moe.intermediate_size * moe.shared_experts * size,
    )
