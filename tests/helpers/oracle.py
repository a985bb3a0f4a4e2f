"""Bridges the torch-only reference (ref_tiny) and the engine: same configuration, same weights, same tokens."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from helpers import ref_tiny

from anabranch.config.fusion import FusionConfig
from anabranch.config.model import (
    ActivationConfig,
    KdaConfig,
    MlaConfig,
    ModelConfig,
    MoeConfig,
)
from anabranch.engine.cache import PAGE, Cache, CacheShape
from anabranch.layers.batch import Batch
from anabranch.models.kimi import KimiForCausalLM
from anabranch.ops.segments import Segments


def model_config(c: ref_tiny.Cfg, **changes) -> ModelConfig:
    """The engine's configuration of a ref_tiny model."""
    config = ModelConfig(
        architecture="kimi_k3" if c.res_block else "kimi_linear",
        hidden_size=c.hidden,
        vocab_size=c.vocab,
        layer_kinds=tuple("kda" if c.is_kda(i) else "mla" for i in range(c.layers)),
        moe_layers=tuple(c.is_moe(i) for i in range(c.layers)),
        intermediate_size=c.dense_inter,
        rms_norm_eps=c.eps,
        activation=ActivationConfig(name="silu")
        if c.act == "silu"
        else ActivationConfig(name="situ", beta=c.situ_beta, linear_beta=c.situ_linear_beta),
        kda=KdaConfig(
            heads=c.kda_heads,
            head_dim=c.kda_dim,
            conv_size=c.conv_k,
            gate_lower_bound=c.lower_bound,
            full_rank_gate=c.full_rank_gate,
        ),
        mla=MlaConfig(
            heads=c.heads,
            q_lora_rank=c.q_lora,
            kv_lora_rank=c.kv_lora,
            nope_dim=c.nope,
            rope_dim=c.rope,
            v_dim=c.vdim,
            output_gate=c.mla_gate,
            norm_eps=c.mla_eps,
        ),
        moe=MoeConfig(
            experts=c.experts,
            top_k=c.topk,
            shared_experts=c.shared,
            intermediate_size=c.moe_inter,
            groups=c.groups,
            top_groups=c.topk_group,
            scoring="sigmoid",
            renormalize=c.renorm,
            scaling=c.rsf,
            latent_size=c.latent,
            latent_norm=c.latent_norm,
        ),
        attn_res_block=c.res_block,
        max_context=4096,
        bos_id=None,
        eos_ids=(),
        pad_id=None,
        dtype="float32",
        expert_format="plain",
    )
    return replace(config, **changes)


def engine_model(c: ref_tiny.Cfg, weights: dict[str, torch.Tensor], fusion: FusionConfig | None = None, **kw):
    """The engine's model with ref_tiny's weights, loaded through the ordinary state dict."""
    model = KimiForCausalLM(model_config(c), fusion=fusion, **kw)
    if torch.get_default_dtype() == torch.float64:
        model.double()
    model.load_state_dict({n: t.flatten()[: c.kda_heads] if n.endswith("A_log") else t for n, t in weights.items()})
    return model


class Session:
    """Feeds tokens to a model sequence by sequence, as a scheduler would, and returns the logits of every token."""

    def __init__(self, model: KimiForCausalLM, sequences: int = 4, pages: int = 64, device: str = "cpu") -> None:
        self.model, self.device = model, device
        dtype = torch.get_default_dtype()
        shape = CacheShape.of(model.config, model.parallel, dtype, dtype)
        self.cache = Cache(model.config, model.parallel, shape, slots=sequences + 1, pages=pages, device=device)
        order = torch.randperm(pages, generator=torch.Generator().manual_seed(5)).tolist()
        self.free = list(order)
        self.tables: dict[int, list[int]] = {}
        self.contexts: dict[int, int] = {}

    def step(self, *segments: tuple[int, Sequence[int]], decodes: int = 0) -> list[torch.Tensor]:
        """segments: (sequence number, tokens); the first `decodes` take the decode forms. Logits per segment."""
        tokens, rows = [], []
        for s, ids in segments:
            table, context = self.tables.setdefault(s, []), self.contexts.setdefault(s, 0)
            while len(table) * PAGE < context + len(ids):
                table.append(self.free.pop())
            tokens += list(ids)
            rows += [table[p // PAGE] * PAGE + p % PAGE for p in range(context, context + len(ids))]
        widest = max(len(self.tables[s]) for s, _ in segments)
        lengths = [len(ids) for _, ids in segments]
        totals = [self.contexts[s] + len(ids) for s, ids in segments]
        batch = Batch(
            tokens=self._tensor(tokens),
            segments=Segments.of(lengths, totals, self.device),
            prefill=Segments.of(lengths[decodes:], totals[decodes:], self.device),
            decodes=decodes,
            slots=self._tensor([s for s, _ in segments]),
            block_table=self._tensor([self.tables[s] + [0] * (widest - len(self.tables[s])) for s, _ in segments]),
            rows=self._tensor(rows),
            wanted=torch.arange(len(tokens), device=self.device),
        )
        with torch.inference_mode():
            logits = self.model(batch, self.cache.layers)
        for s, ids in segments:
            self.contexts[s] += len(ids)
        return list(logits.split([len(ids) for _, ids in segments]))

    def _tensor(self, values: list) -> torch.Tensor:
        return torch.tensor(values, device=self.device)
