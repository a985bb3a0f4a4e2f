"""Which implementation of each operation a model runs: chosen once, when the model is built, with a reason.

An implementation is named by its module, imported only when it is chosen: the CPU path never imports Triton.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from typing import Any

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.verdict import Verdict
from anabranch.ops import shapes
from anabranch.ops.implementation import Implementation

Op = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """Every operation that layers and the sampler call. Contracts are in `ops/<folder>/spec.py`.

    `kda_step`, `kda_inputs`, `mla_step`, `norm_route` or `expert_ffn` None: the layer runs the operations that it would
    fuse.
    `prefill_layout` is what kda_prefill wants of kda_inputs; where that is "grouped", `kda_prompt` is its form that
    norms and gates for itself. `prefill_saves`: both forms take `saves`, and `conv_save` keeps the rows that go with a
    state.
    """

    linear: Op
    fp8_linear: Op
    batched_linear: Op
    gemm_low_rank: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rms_norm: Op
    add_rms_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    l2_norm: Op
    gated_rms_norm: Op
    conv: Op
    kda_inputs: Callable[..., tuple[torch.Tensor, ...]] | None
    log_decay: Op
    kda_decode: Op
    kda_prefill: Op
    kda_step: Op | None
    mla_write: Callable[..., None]
    mla_decode: Op
    mla_prefill: Op
    mla_step: Op | None
    sigmoid_gate: Op
    glu: Op
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    norm_route: Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]] | None
    routed_experts: Op
    expert_ffn: Op | None
    residual_norm: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    log_softmax: Op
    pick: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    prefill_layout: str = "normed"
    kda_prompt: Op | None = None
    prefill_saves: bool = False
    conv_save: Callable[..., None] | None = None


# what goes with the implementation of another operation, and is not chosen
_WITH_ANOTHER = ("prefill_layout", "kda_prompt", "prefill_saves", "conv_save")
OP_NAMES = tuple(f.name for f in fields(Ops) if f.name not in _WITH_ANOTHER)

_FOLDERS = {
    "batched_linear": "linear",
    "gemm_low_rank": "skinny_gemm",
    "rms_norm": "norm",
    "add_rms_norm": "norm",
    "l2_norm": "norm",
    "gated_rms_norm": "norm",
    "log_decay": "kda_gate",
    "mla_write": "mla",
    "mla_decode": "mla",
    "mla_prefill": "mla",
    "mla_step": "mla",
    "sigmoid_gate": "gate",
    "route": "router",
    "norm_route": "router",
    "routed_experts": "experts",
    "residual_norm": "attn_residual",
    "pick": "log_softmax",
}


_REFERENCE = Implementation(name="reference")
_INVARIANT_REFERENCE = Implementation(name="reference", batch_invariant=True)
_DETERMINISTIC = Implementation(name="deterministic", batch_invariant=True)
_CHAIN = Implementation(name="chain", batch_invariant=True)  # no operation: the layer runs those that it would fuse


def _triton(fits: Callable[[ModelConfig], Verdict] | None = None, batch_invariant: bool = True) -> Implementation:
    return Implementation(name="triton", batch_invariant=batch_invariant, device="cuda", package="triton", fits=fits)


def _native(folder: str, name: str = "cuda", **more: Any) -> Implementation:
    """One in CUDA C++ of this folder, for bf16."""
    return Implementation(name=name, device="cuda", native=folder, dtypes=(torch.bfloat16,), **more)


_SKINNY = _native("skinny_gemm", "skinny")
_SEGMENTED = _native("skinny_gemm", "segmented", batch_invariant=True)

# in order of preference; a reference that is elementwise needs no deterministic twin
IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    "linear": (_SKINNY, _REFERENCE, _SEGMENTED, _triton(), _DETERMINISTIC),
    # beside the Triton kernel the reference would hold every weight in fp32, so it comes second on a GPU
    "fp8_linear": (
        _native("fp8_linear", "skinny", package="triton"),
        Implementation(name="expanded", device="cuda", package="triton", dtypes=(torch.bfloat16,)),
        _native("fp8_linear", "segmented", package="triton", batch_invariant=True),
        _triton(),
        _REFERENCE,
        _DETERMINISTIC,
    ),
    "batched_linear": (_SKINNY, _REFERENCE, _SEGMENTED, _triton(), _DETERMINISTIC),
    # the bits of `segmented` in every mode
    "gemm_low_rank": (_native("skinny_gemm", batch_invariant=True, fits=shapes.low_rank), _REFERENCE, _DETERMINISTIC),
    "rms_norm": (_triton(), _REFERENCE, _DETERMINISTIC),
    "add_rms_norm": (_triton(), _REFERENCE, _DETERMINISTIC),
    "l2_norm": (_triton(), _REFERENCE, _DETERMINISTIC),
    "gated_rms_norm": (_triton(), _REFERENCE, _DETERMINISTIC),
    "conv": (_triton(), _INVARIANT_REFERENCE),
    "kda_inputs": (
        _triton(shapes.kda_heads),
        _CHAIN,
        _REFERENCE,
        _DETERMINISTIC,
    ),
    "log_decay": (_triton(), _INVARIANT_REFERENCE),
    "kda_decode": (_triton(shapes.kda_heads), _REFERENCE, _DETERMINISTIC),
    "kda_prefill": (
        _native("kda_prefill", package="triton", fits=shapes.heads_of_128, layout="grouped", saves=True),
        Implementation(
            name="chunked",
            device="cuda",
            package="triton",
            dtypes=(torch.bfloat16,),
            fits=shapes.heads_of_128,
            layout="grouped",
            saves=True,
        ),
        Implementation(
            name="fla",
            device="cuda",
            package="fla",
            dtypes=(torch.bfloat16, torch.float16),
            fits=shapes.kda_heads,
            layout="rounded",
        ),
        Implementation(
            name="flash",
            device="cuda",
            package="flash_kda",
            dtypes=(torch.bfloat16,),
            fits=shapes.bounded_heads_of_128,
            layout="grouped",
        ),
        _triton(shapes.kda_heads),
        Implementation(name="reference", saves=True),
        _DETERMINISTIC,
    ),
    # its bits differ from those of prompt tokens, which run the chain
    "kda_step": (
        Implementation(
            name="cuda", device="cuda", native="kda_step", dtypes=(torch.bfloat16,), fits=shapes.heads_of_128
        ),
        _triton(shapes.four_taps, batch_invariant=False),
        Implementation(name="cpu", device="cpu"),
        _CHAIN,
        Implementation(name="reference", device="cpu"),  # only by name: a step that takes f_b on a CPU
    ),
    "mla_write": (_triton(shapes.latent), _REFERENCE, _DETERMINISTIC),
    "mla_decode": (_triton(shapes.latent), _REFERENCE, _DETERMINISTIC),
    "mla_prefill": (
        Implementation(
            name="cudnn",
            device="cuda",
            package="triton",
            dtypes=(torch.bfloat16, torch.float16),
            fits=shapes.cudnn_heads,
        ),
        Implementation(name="sdpa", device="cuda"),
        _triton(shapes.latent),
        _REFERENCE,
        _DETERMINISTIC,
    ),
    # its shares, and so its bits, know the batch
    "mla_step": (
        Implementation(name="balanced", device="cuda", package="triton", fits=shapes.balanced),
        _CHAIN,
    ),
    "sigmoid_gate": (_triton(), _INVARIANT_REFERENCE),
    "glu": (_triton(), _REFERENCE, _DETERMINISTIC),
    # the bits of a few tokens are not those of many
    "route": (
        _native("router", package="triton", fits=shapes.few_routed),
        _triton(shapes.ungrouped),
        _REFERENCE,
        _DETERMINISTIC,
    ),
    "norm_route": (
        _native("router", package="triton", fits=shapes.few_normed, alone=True),
        _CHAIN,
    ),
    "routed_experts": (_triton(), _REFERENCE, _DETERMINISTIC),
    # the bits of one token are not those of prompt tokens
    "expert_ffn": (
        _native("expert_ffn", package="triton", fits=shapes.plain_experts),
        _triton(),
        _CHAIN,
    ),
    "residual_norm": (_triton(), _REFERENCE, _DETERMINISTIC),
    "log_softmax": (_triton(), _REFERENCE, _DETERMINISTIC),
    "pick": (_triton(), _REFERENCE, _DETERMINISTIC),
}

# the two forms of a layer must come from one implementation, or a token's bits depend on how it was scheduled
_PAIRS = (("kda_decode", "kda_prefill"), ("mla_decode", "mla_prefill"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The chosen operations, and for each its implementation's name and why it was chosen."""

    ops: Ops
    chosen: Mapping[str, tuple[str, str]]


def select(
    config: ModelConfig | None,
    device: torch.device,
    *,
    dtype: torch.dtype = torch.bfloat16,
    deterministic: bool = False,
    replicas: int = 1,
    wishes: Mapping[str, str] | None = None,
) -> Selection:
    """Choose every operation for this model and device.

    Args:
        config: the model; None asks about models in general.
        replicas: attention replicas that share the ranks.
        wishes: operation name -> implementation name; each is honoured or refused, never dropped.

    Raises:
        ValueError: a wish names an unknown operation or implementation, or one that cannot run here.
    """
    wishes = wishes or {}
    for name in wishes:
        if name not in OP_NAMES:
            raise ValueError(f"op {name!r} is unknown; accepted: {', '.join(OP_NAMES)}")
    where = (config, device, deterministic, dtype, replicas)
    chosen = {name: _choose(name, wishes.get(name), *where) for name in OP_NAMES}
    if deterministic:
        for one, other in _PAIRS:
            if chosen[one][0] != chosen[other][0]:
                pair = f"op {one}={chosen[one][0]} with {other}={chosen[other][0]}"
                raise ValueError(f"{pair}: deterministic mode needs the same implementation for both")
    functions = {name: _load(name, implementation) for name, (implementation, _) in chosen.items()}
    prefill = next(i for i in IMPLEMENTATIONS["kda_prefill"] if i.name == chosen["kda_prefill"][0])
    beside = {
        "prefill_layout": prefill.layout,
        "kda_prompt": _load("kda_prefill", prefill.name, "kda_prompt") if prefill.layout == "grouped" else None,
        "prefill_saves": prefill.saves,
        "conv_save": _load("conv", chosen["conv"][0], "save_rows"),
    }
    return Selection(ops=Ops(**functions, **beside), chosen=chosen)


def _choose(
    name: str,
    wish: str | None,
    config: ModelConfig | None,
    device: torch.device,
    deterministic: bool,
    dtype: torch.dtype,
    replicas: int,
) -> tuple[str, str]:
    candidates = {i.name: i for i in IMPLEMENTATIONS[name]}
    if wish is not None:
        if wish not in candidates:
            raise ValueError(f"op {name}={wish}: accepted are {', '.join(candidates)}")
        verdict = candidates[wish].verdict(config, device, deterministic, dtype, replicas)
        if not verdict.ok:
            raise ValueError(f"op {name}={wish} cannot be honoured: {verdict.reason}")
        return wish, "asked for"
    refused = []
    for implementation in candidates.values():
        verdict = implementation.verdict(config, device, deterministic, dtype, replicas)
        if verdict.ok:
            return implementation.name, "; ".join([verdict.reason, *refused])
        refused.append(f"{implementation.name}: {verdict.reason}")
    raise AssertionError(f"{name}: some implementation must run anywhere")


def _load(name: str, implementation: str, function: str | None = None) -> Any:
    module = import_module(f"anabranch.ops.{_FOLDERS.get(name, name)}.{implementation}")
    return getattr(module, function or name)
