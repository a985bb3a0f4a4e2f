"""From-the-spec reference of Kimi-Linear and the Kimi-K3 text backbone: plain PyTorch, functional, CPU.

Weights are a dict under the Hugging Face checkpoint names (without K3's `language_model.` prefix). Written from the
model description alone and verified against transformers, vLLM's layer flow and fla's naive KDA before it came here;
the engine is tested against it, so it shares no code with the engine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

T = torch.Tensor


# ----------------------------------------------------------------------------- config
@dataclass
class Cfg:
    vocab: int = 96
    hidden: int = 64
    layers: int = 6
    kda_layers: tuple = (1, 2, 3, 5)  # ONE-based, as in config.json
    full_layers: tuple = (4, 6)
    kda_heads: int = 4
    kda_dim: int = 16
    conv_k: int = 4
    lower_bound: float | None = None  # None -> softplus gate, -5.0 -> K3
    full_rank_gate: bool = False
    heads: int = 4
    q_lora: int | None = None
    kv_lora: int = 32
    nope: int = 16
    rope: int = 8
    vdim: int = 16
    mla_gate: bool = False
    dense_inter: int = 96
    first_dense: int = 1
    experts: int = 8
    topk: int = 2
    groups: int = 1
    topk_group: int = 1
    shared: int = 1
    moe_inter: int = 32
    latent: int | None = None
    latent_norm: bool = False
    renorm: bool = True
    rsf: float = 2.446
    act: str = "silu"
    situ_beta: float = 4.0
    situ_linear_beta: float | None = 25.0
    res_block: int | None = None  # attn_res_block_size
    eps: float = 1e-5  # rms_norm_eps
    mla_eps: float = 1e-6  # q_a / kv_a norm (see spec pitfall P1)
    a_log_len: int | None = None  # stored A_log length (K3: 128 for 96 heads)

    def is_kda(self, i: int) -> bool:
        return (i + 1) in self.kda_layers

    def is_moe(self, i: int) -> bool:
        return i >= self.first_dense


def kimi_linear_tiny(**kw) -> Cfg:
    return Cfg(**kw)


def kimi_k3_tiny(**kw) -> Cfg:
    base = dict(
        layers=9,
        kda_layers=(1, 2, 3, 5, 6, 7),
        full_layers=(4, 8, 9),
        lower_bound=-5.0,
        full_rank_gate=True,
        q_lora=24,
        mla_gate=True,
        latent=32,
        latent_norm=True,
        shared=2,
        topk=3,
        rsf=1.0,
        act="situ",
        res_block=3,
        a_log_len=6,
    )
    base.update(kw)
    return Cfg(**base)


# ----------------------------------------------------------------------------- weights
def param_shapes(c: Cfg) -> dict[str, tuple]:
    """All checkpoint tensors (name -> shape) of the text model."""
    s: dict[str, tuple] = {
        "model.embed_tokens.weight": (c.vocab, c.hidden),
        "model.norm.weight": (c.hidden,),
        "lm_head.weight": (c.vocab, c.hidden),
    }
    P = c.kda_heads * c.kda_dim
    for i in range(c.layers):
        L = f"model.layers.{i}."
        s[L + "input_layernorm.weight"] = (c.hidden,)
        s[L + "post_attention_layernorm.weight"] = (c.hidden,)
        if c.res_block:
            for n in ("self_attention_res", "mlp_res"):
                s[L + n + "_norm.weight"] = (c.hidden,)
                s[L + n + "_proj.weight"] = (1, c.hidden)
        A = L + "self_attn."
        if c.is_kda(i):
            for n in "qkv":
                s[A + f"{n}_proj.weight"] = (P, c.hidden)
                s[A + f"{n}_conv1d.weight"] = (P, 1, c.conv_k)
            s[A + "A_log"] = (c.a_log_len,) if c.a_log_len else (1, 1, c.kda_heads, 1)
            s[A + "dt_bias"] = (P,)
            s[A + "f_a_proj.weight"] = (c.kda_dim, c.hidden)
            s[A + "f_b_proj.weight"] = (P, c.kda_dim)
            s[A + "b_proj.weight"] = (c.kda_heads, c.hidden)
            if c.full_rank_gate:
                s[A + "g_proj.weight"] = (P, c.hidden)
            else:
                s[A + "g_a_proj.weight"] = (c.kda_dim, c.hidden)
                s[A + "g_b_proj.weight"] = (P, c.kda_dim)
            s[A + "o_norm.weight"] = (c.kda_dim,)
            s[A + "o_proj.weight"] = (c.hidden, P)
        else:
            Q = c.heads * (c.nope + c.rope)
            if c.q_lora:
                s[A + "q_a_proj.weight"] = (c.q_lora, c.hidden)
                s[A + "q_a_layernorm.weight"] = (c.q_lora,)
                s[A + "q_b_proj.weight"] = (Q, c.q_lora)
            else:
                s[A + "q_proj.weight"] = (Q, c.hidden)
            s[A + "kv_a_proj_with_mqa.weight"] = (c.kv_lora + c.rope, c.hidden)
            s[A + "kv_a_layernorm.weight"] = (c.kv_lora,)
            s[A + "kv_b_proj.weight"] = (c.heads * (c.nope + c.vdim), c.kv_lora)
            if c.mla_gate:
                s[A + "g_proj.weight"] = (c.heads * c.vdim, c.hidden)
            s[A + "o_proj.weight"] = (c.hidden, c.heads * c.vdim)
        if not c.is_moe(i):
            M = L + "mlp."
            s[M + "gate_proj.weight"] = (c.dense_inter, c.hidden)
            s[M + "up_proj.weight"] = (c.dense_inter, c.hidden)
            s[M + "down_proj.weight"] = (c.hidden, c.dense_inter)
        else:
            M = L + "block_sparse_moe."
            W = c.latent or c.hidden
            s[M + "gate.weight"] = (c.experts, c.hidden)
            s[M + "gate.e_score_correction_bias"] = (c.experts,)
            for e in range(c.experts):
                s[M + f"experts.{e}.w1.weight"] = (c.moe_inter, W)
                s[M + f"experts.{e}.w2.weight"] = (W, c.moe_inter)
                s[M + f"experts.{e}.w3.weight"] = (c.moe_inter, W)
            si = c.moe_inter * c.shared
            s[M + "shared_experts.gate_proj.weight"] = (si, c.hidden)
            s[M + "shared_experts.up_proj.weight"] = (si, c.hidden)
            s[M + "shared_experts.down_proj.weight"] = (c.hidden, si)
            if c.latent:
                s[M + "routed_expert_down_proj.weight"] = (c.latent, c.hidden)
                s[M + "routed_expert_up_proj.weight"] = (c.hidden, c.latent)
                if c.latent_norm:
                    s[M + "routed_expert_norm.weight"] = (c.latent,)
    if c.res_block:
        s["model.output_attn_res_norm.weight"] = (c.hidden,)
        s["model.output_attn_res_proj.weight"] = (1, c.hidden)
    return s


def random_weights(c: Cfg, seed: int = 0) -> dict[str, T]:
    """Random weights with magnitudes that exercise gates, caps and the residual softmax."""
    g = torch.Generator().manual_seed(seed)
    w = {}
    for n, sh in param_shapes(c).items():
        if n.endswith("A_log"):
            t = torch.log(torch.empty(sh).uniform_(1, 16, generator=g))
            if c.a_log_len:
                t = torch.randn(sh, generator=g) * 0.7
        elif n.endswith("dt_bias"):
            t = torch.randn(sh, generator=g) - (3.0 if c.lower_bound is None else 1.0)
        elif n.endswith("e_score_correction_bias"):
            t = torch.randn(sh, generator=g) * 0.3
        elif "norm" in n.split(".")[-2]:
            t = 1.0 + 0.2 * torch.randn(sh, generator=g)
        elif n.endswith("conv1d.weight"):
            t = torch.randn(sh, generator=g) * 0.6
        elif n.endswith("res_proj.weight"):
            t = torch.randn(sh, generator=g) * 0.4
        elif n.endswith("embed_tokens.weight"):
            t = torch.randn(sh, generator=g)
        else:
            t = torch.randn(sh, generator=g) * (1.6 / math.sqrt(sh[-1]))
        w[n] = t
    return w


# ----------------------------------------------------------------------------- small ops
def rms(x: T, w: T, eps: float) -> T:
    xf = x.float()
    y = xf / torch.sqrt(xf.square().mean(-1, keepdim=True) + eps)
    return y.to(x.dtype) * w.to(x.dtype)  # round to model dtype BEFORE the weight (HF order)


def unit(x: T) -> T:  # q/k L2 norm: eps is added to the SUM of squares
    xf = x.float()
    return xf / torch.sqrt(xf.square().sum(-1, keepdim=True) + 1e-6)


def glu(c: Cfg, gate: T, up: T) -> T:
    g, u = gate.float(), up.float()
    if c.act == "silu":
        return F.silu(gate) * up
    a = c.situ_beta * torch.tanh(g / c.situ_beta) * torch.sigmoid(g)
    if c.situ_linear_beta is not None:
        u = c.situ_linear_beta * torch.tanh(u / c.situ_linear_beta)
    return (a * u).to(gate.dtype)


# ----------------------------------------------------------------------------- KDA
def conv_block(x: T, hist: T, w: T) -> tuple[T, T]:
    """x [n,C] raw projection rows, hist [K-1,C] last raw rows, w [C,K] (w[:,K-1] hits current).

    y_t = silu( sum_j w[:,j] * x_{t-(K-1)+j} ), history of the PRE-conv values is kept."""
    K = w.shape[1]
    full = torch.cat([hist.to(x.dtype), x], 0).float()
    n = x.shape[0]
    acc = torch.zeros_like(full[:n])
    for j in range(K):
        acc = acc + full[j : j + n] * w[:, j].float()
    return F.silu(acc).to(x.dtype), torch.cat([hist.to(x.dtype), x], 0)[-(K - 1) :].clone()


def kda_log_decay(f: T, dt_bias: T, a_log: T, lower: float | None) -> T:
    """f [n,H,D] raw forget projection -> log decay (<= 0), fp32.  a_log [H], dt_bias [H*D]."""
    H, D = f.shape[-2:]
    z = f.float() + dt_bias.float().view(H, D)
    rate = a_log.float().exp().view(H, 1)
    if lower is None:
        sp = torch.where(z > 20.0, z, torch.log1p(torch.exp(torch.clamp(z, max=20.0))))
        return -rate * sp
    return lower * torch.sigmoid(rate * z)


def kda_recurrent(q: T, k: T, v: T, g: T, beta: T, S: T) -> tuple[T, T]:
    """Token-by-token.  q,k [n,H,Dk] (already L2-normed), v [n,H,Dv], g [n,H,Dk] log decay,
    beta [n,H], S [H,Dk,Dv] fp32."""
    scale = q.shape[-1] ** -0.5
    out = []
    for t in range(q.shape[0]):
        S = S * g[t].exp().unsqueeze(-1)  # 1. decay every key channel
        pred = torch.einsum("hk,hkv->hv", k[t], S)  # 2. what memory says for k
        S = S + torch.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - pred))
        out.append(torch.einsum("hk,hkv->hv", q[t] * scale, S))  # 3. read AFTER the write
    return torch.stack(out), S


def kda_chunk(q: T, k: T, v: T, g: T, beta: T, S: T, C: int = 16) -> tuple[T, T]:
    """Same map, chunk form (spec 4.7); pairwise exponents only, so it never overflows."""
    n, _, Dk = q.shape
    scale = Dk**-0.5
    outs = []
    for s in range(0, n, C):
        qc, kc, vc, bc = (x[s : s + C].transpose(0, 1) for x in (q, k, v, beta))  # [H,c,*]
        G = g[s : s + C].transpose(0, 1).cumsum(1)  # inclusive cumulative log decay
        c = qc.shape[1]
        low = torch.tril(torch.ones(c, c, dtype=torch.bool))
        E = torch.where(low[None, :, :, None], G[:, :, None] - G[:, None], -torch.inf).exp()
        A = torch.einsum("hid,hjd,hijd->hij", kc, kc, E).tril(-1) * bc[..., None]
        R = torch.einsum("hid,hjd,hijd->hij", qc * scale, kc, E).tril()
        rhs = bc[..., None] * (vc - torch.einsum("hid,hdv->hiv", kc * G.exp(), S))
        U = torch.linalg.solve_triangular(torch.eye(c) + A, rhs, upper=False, unitriangular=True)
        outs.append((torch.einsum("hid,hdv->hiv", qc * scale * G.exp(), S) + R @ U).transpose(0, 1))
        last = G[:, -1:]
        S = S * last.exp().transpose(1, 2) + torch.einsum("hid,hiv->hdv", kc * (last - G).exp(), U)
    return torch.cat(outs), S


def kda_layer(c: Cfg, w, A: str, x: T, st: dict, chunk: int | None, h0: int = 0) -> T:
    H, D = w[A + "b_proj.weight"].shape[0], c.kda_dim
    q, k, v = (F.linear(x, w[A + f"{n}_proj.weight"]) for n in "qkv")
    convd = []
    for n, t in zip("qkv", (q, k, v), strict=True):
        y, st["conv_" + n] = conv_block(t, st["conv_" + n], w[A + f"{n}_conv1d.weight"][:, 0])
        convd.append(y.view(-1, H, D))
    q, k, v = convd
    f = F.linear(F.linear(x, w[A + "f_a_proj.weight"]), w[A + "f_b_proj.weight"]).view(-1, H, D)
    a_log = w[A + "A_log"].reshape(-1)[h0 : h0 + H]  # works for [1,1,H,1], [H], [128]
    g = kda_log_decay(f, w[A + "dt_bias"], a_log, c.lower_bound)
    beta = torch.sigmoid(F.linear(x, w[A + "b_proj.weight"]).float())
    args = (unit(q), unit(k), v.float(), g, beta, st["S"])
    o, st["S"] = kda_recurrent(*args) if chunk is None else kda_chunk(*args, C=chunk)
    o = o.to(x.dtype)
    if c.full_rank_gate:
        z = F.linear(x, w[A + "g_proj.weight"])
    else:
        z = F.linear(F.linear(x, w[A + "g_a_proj.weight"]), w[A + "g_b_proj.weight"])
    of = o.float()
    y = of / torch.sqrt(of.square().mean(-1, keepdim=True) + c.eps)
    y = y * w[A + "o_norm.weight"].float() * torch.sigmoid(z.view(-1, H, D).float())
    return F.linear(y.to(x.dtype).reshape(-1, H * D), w[A + "o_proj.weight"])


# ----------------------------------------------------------------------------- MLA
def mla_layer(c: Cfg, w, A: str, x: T, st: dict, absorb: bool) -> T:
    n = x.shape[0]
    if c.q_lora:
        q = rms(F.linear(x, w[A + "q_a_proj.weight"]), w[A + "q_a_layernorm.weight"], c.mla_eps)
        q = F.linear(q, w[A + "q_b_proj.weight"])
    else:
        q = F.linear(x, w[A + "q_proj.weight"])
    q = q.view(n, -1, c.nope + c.rope)
    H = q.shape[1]
    kv = F.linear(x, w[A + "kv_a_proj_with_mqa.weight"])
    lat = rms(kv[:, : c.kv_lora], w[A + "kv_a_layernorm.weight"], c.mla_eps)
    row = torch.cat([lat, kv[:, c.kv_lora :]], -1)  # cached row: normed latent | raw shared key
    st["kv"] = torch.cat([st["kv"].to(row.dtype), row], 0)
    m = st["kv"].shape[0]
    wkv = w[A + "kv_b_proj.weight"].view(H, c.nope + c.vdim, c.kv_lora)
    wk, wv = wkv[:, : c.nope], wkv[:, c.nope :]
    scale = (c.nope + c.rope) ** -0.5
    lat_all, kr_all = st["kv"][:, : c.kv_lora], st["kv"][:, c.kv_lora :]
    if absorb:
        qa = torch.cat([torch.einsum("nhd,hdr->nhr", q[..., : c.nope], wk), q[..., c.nope :]], -1)
        sc = torch.einsum("nhr,mr->hnm", qa, st["kv"]) * scale
    else:
        kn = torch.einsum("mr,hdr->mhd", lat_all, wk)
        kf = torch.cat([kn, kr_all[:, None].expand(m, H, c.rope)], -1)
        sc = torch.einsum("nhd,mhd->hnm", q, kf) * scale
    pos_q = torch.arange(m - n, m)[:, None]
    sc = sc.masked_fill(torch.arange(m)[None] > pos_q, -torch.inf)
    p = torch.softmax(sc.float(), -1).to(x.dtype)
    if absorb:
        o = torch.einsum("nhr,hdr->nhd", torch.einsum("hnm,mr->nhr", p, lat_all), wv)
    else:
        o = torch.einsum("hnm,mhd->nhd", p, torch.einsum("mr,hdr->mhd", lat_all, wv))
    o = o.reshape(n, H * c.vdim)
    if c.mla_gate:
        o = o * torch.sigmoid(F.linear(x, w[A + "g_proj.weight"]))
    return F.linear(o, w[A + "o_proj.weight"])


# ----------------------------------------------------------------------------- MoE
def route(c: Cfg, x: T, gate_w: T, bias: T) -> tuple[T, T]:
    s = torch.sigmoid(F.linear(x.float(), gate_w.float()))  # fp32 scores
    pick = s + bias.float()  # bias only for choosing
    if c.groups > 1:
        pg = pick.view(x.shape[0], c.groups, -1)
        gs = pg.topk(2, -1).values.sum(-1)
        keep = torch.zeros_like(gs, dtype=torch.bool).scatter_(1, gs.topk(c.topk_group, -1).indices, True)
        pick = pg.masked_fill(~keep[..., None], -torch.inf).flatten(1)
    idx = pick.topk(c.topk, -1).indices
    wt = s.gather(1, idx)
    if c.renorm and c.topk > 1:
        wt = wt / (wt.sum(-1, keepdim=True) + 1e-20)
    return wt * c.rsf, idx


def experts_sum(c: Cfg, w, M: str, x: T, wt: T, idx: T) -> T:
    acc = torch.zeros(x.shape[0], w[M + "experts.0.w2.weight"].shape[0])
    for e in range(c.experts):
        tok, slot = (idx == e).nonzero(as_tuple=True)
        if tok.numel() == 0:
            continue
        h = glu(c, F.linear(x[tok], w[M + f"experts.{e}.w1.weight"]), F.linear(x[tok], w[M + f"experts.{e}.w3.weight"]))
        y = F.linear(h, w[M + f"experts.{e}.w2.weight"])
        acc.index_add_(0, tok, y.float() * wt[tok, slot, None])
    return acc.to(x.dtype)


def mlp(c: Cfg, w, M: str, x: T) -> T:
    return F.linear(
        glu(c, F.linear(x, w[M + "gate_proj.weight"]), F.linear(x, w[M + "up_proj.weight"])), w[M + "down_proj.weight"]
    )


def moe(c: Cfg, w, M: str, x: T) -> T:
    wt, idx = route(c, x, w[M + "gate.weight"], w[M + "gate.e_score_correction_bias"])
    z = F.linear(x, w[M + "routed_expert_down_proj.weight"]) if c.latent else x  # routing used x, not z
    y = experts_sum(c, w, M, z, wt, idx)
    if c.latent:
        if c.latent_norm:
            y = rms(y, w[M + "routed_expert_norm.weight"], c.eps)
        y = F.linear(y, w[M + "routed_expert_up_proj.weight"])
    return y + mlp(c, w, M + "shared_experts.", x)


# ----------------------------------------------------------------------------- attention residual
def attn_res(prefix: T, bank: list[T], norm_w: T, proj_w: T, eps: float) -> T:
    if not bank:
        return prefix
    V = torch.stack([*bank, prefix], 1).float()  # [n, blocks+1, hidden]
    K = V / torch.sqrt(V.square().mean(-1, keepdim=True) + eps)
    p = torch.softmax((K * (norm_w.float() * proj_w.float().reshape(-1))).sum(-1), -1)
    return torch.einsum("nr,nrd->nd", p, V).to(prefix.dtype)  # values are the RAW rows


# ----------------------------------------------------------------------------- model
class Model:
    def __init__(self, c: Cfg, w: dict[str, T], dtype=torch.float32):
        self.c, self.dtype = c, dtype
        keep = ("A_log", "dt_bias", "e_score_correction_bias")
        self.w = {n: (t if n.endswith(keep) or "conv1d" in n else t.to(dtype)) for n, t in w.items()}

    def new_state(self) -> list[dict]:
        c, P = self.c, self.c.kda_heads * self.c.kda_dim
        out = []
        for i in range(c.layers):
            if c.is_kda(i):
                d = {"conv_" + n: torch.zeros(c.conv_k - 1, P, dtype=self.dtype) for n in "qkv"}
                d["S"] = torch.zeros(c.kda_heads, c.kda_dim, c.kda_dim)
            else:
                d = {"kv": torch.zeros(0, c.kv_lora + c.rope, dtype=self.dtype)}
            out.append(d)
        return out

    def step(self, ids: T, st: list[dict], chunk: int | None = 16, absorb: bool = False) -> T:
        """ids [n] of ONE sequence, appended to st.  chunk=None: token recurrence.  Returns logits [n,V]."""
        c, w = self.c, self.w
        h = F.embedding(ids, w["model.embed_tokens.weight"])
        bank: list[T] = []  # per-forward, never cached across steps
        for i in range(c.layers):
            L = f"model.layers.{i}."
            A = L + "self_attn."

            def attn(z, i=i, L=L, A=A):
                z = rms(z, w[L + "input_layernorm.weight"], c.eps)
                return kda_layer(c, w, A, z, st[i], chunk) if c.is_kda(i) else mla_layer(c, w, A, z, st[i], absorb)

            def ffn(z, i=i, L=L):
                z = rms(z, w[L + "post_attention_layernorm.weight"], c.eps)
                return moe(c, w, L + "block_sparse_moe.", z) if c.is_moe(i) else mlp(c, w, L + "mlp.", z)

            if not c.res_block:
                h = h + attn(h)
                h = h + ffn(h)
                continue
            read = attn_res(
                h, bank, w[L + "self_attention_res_norm.weight"], w[L + "self_attention_res_proj.weight"], c.eps
            )
            write = i % c.res_block == 0
            if write:
                bank = [*bank, h]  # bank the running sum, then restart it
            a = attn(read)
            h = a if write else h + a
            h = h + ffn(attn_res(h, bank, w[L + "mlp_res_norm.weight"], w[L + "mlp_res_proj.weight"], c.eps))
        if c.res_block:
            h = attn_res(h, bank, w["model.output_attn_res_norm.weight"], w["model.output_attn_res_proj.weight"], c.eps)
        h = rms(h, w["model.norm.weight"], c.eps)
        return F.linear(h, w["lm_head.weight"])


# ----------------------------------------------------------------------------- MXFP4
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def mxfp4_dequant(packed: T, scale: T) -> T:
    """packed uint8 [N,K/2], scale uint8 [N,K/32] -> fp32 [N,K].  Low nibble = even column."""
    lo, hi = E2M1[(packed & 15).long()], E2M1[(packed >> 4).long()]
    v = torch.stack([lo, hi], -1).flatten(-2)
    return v * torch.exp2(scale.float() - 127.0).repeat_interleave(32, -1)
