"""Which implementation of each operation a model runs: chosen once, when the model is built, with a reason.

An implementation is named by its module, imported only when it is chosen: the CPU path never imports Triton.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib import import_module
from importlib.util import find_spec

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.verdict import Verdict

Op = Callable[..., torch.Tensor]


@dataclass(frozen=True, kw_only=True, slots=True)
class Ops:
    """Every operation that layers and the sampler call. Contracts are in `ops/<folder>/spec.py`."""

    linear: Op
    batched_linear: Op
    rms_norm: Op
    l2_norm: Op
    gated_rms_norm: Op
    conv: Op
    log_decay: Op
    kda_decode: Op
    kda_prefill: Op
    mla_decode: Op
    mla_prefill: Op
    sigmoid_gate: Op
    glu: Op
    route: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    routed_experts: Op
    residual_read: Op
    log_softmax: Op


OP_NAMES = tuple(f.name for f in fields(Ops))

_FOLDERS = {
    "batched_linear": "linear",
    "rms_norm": "norm",
    "l2_norm": "norm",
    "gated_rms_norm": "norm",
    "log_decay": "kda_gate",
    "mla_decode": "mla",
    "mla_prefill": "mla",
    "sigmoid_gate": "gate",
    "route": "router",
    "routed_experts": "experts",
    "residual_read": "attn_residual",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """`batch_invariant`: a row's bits do not depend on the other rows, so deterministic mode may use it."""

    name: str
    batch_invariant: bool = False
    device: str | None = None
    package: str | None = None

    def verdict(self, config: ModelConfig | None, device: torch.device, deterministic: bool) -> Verdict:
        """Whether this implementation may run here."""
        if deterministic and not self.batch_invariant:
            return Verdict(False, "not batch-invariant")
        if self.device is not None and device.type != self.device:
            return Verdict(False, f"needs {self.device}")
        if self.package is not None and find_spec(self.package) is None:
            return Verdict(False, f"needs the package {self.package}")
        return Verdict(True, "first that fits")


_REFERENCE, _DETERMINISTIC = (
    Implementation(name="reference"),
    Implementation(name="deterministic", batch_invariant=True),
)
_ELEMENTWISE = (Implementation(name="reference", batch_invariant=True),)

# in order of preference; a reference that is elementwise needs no deterministic twin
IMPLEMENTATIONS: dict[str, tuple[Implementation, ...]] = {
    name: _ELEMENTWISE if name in ("conv", "log_decay", "sigmoid_gate", "glu") else (_REFERENCE, _DETERMINISTIC)
    for name in OP_NAMES
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection:
    """The chosen operations, and for each its implementation's name and why it was chosen."""

    ops: Ops
    chosen: Mapping[str, tuple[str, str]]


def select(
    config: ModelConfig | None,
    device: torch.device,
    *,
    deterministic: bool = False,
    wishes: Mapping[str, str] | None = None,
) -> Selection:
    """Choose every operation for this model and device.

    Args:
        config: the model; None asks about models in general.
        wishes: operation name -> implementation name; each is honoured or refused, never dropped.

    Raises:
        ValueError: a wish names an unknown operation or implementation, or one that cannot run here.
    """
    wishes = wishes or {}
    for name in wishes:
        if name not in OP_NAMES:
            raise ValueError(f"op {name!r} is unknown; accepted: {', '.join(OP_NAMES)}")
    chosen = {name: _choose(name, wishes.get(name), config, device, deterministic) for name in OP_NAMES}
    functions = {name: _load(name, implementation) for name, (implementation, _) in chosen.items()}
    return Selection(ops=Ops(**functions), chosen=chosen)


def _choose(
    name: str, wish: str | None, config: ModelConfig | None, device: torch.device, deterministic: bool
) -> tuple[str, str]:
    candidates = {i.name: i for i in IMPLEMENTATIONS[name]}
    if wish is not None:
        if wish not in candidates:
            raise ValueError(f"op {name}={wish}: accepted are {', '.join(candidates)}")
        verdict = candidates[wish].verdict(config, device, deterministic)
        if not verdict.ok:
            raise ValueError(f"op {name}={wish} cannot be honoured: {verdict.reason}")
        return wish, "asked for"
    refused = []
    for implementation in candidates.values():
        verdict = implementation.verdict(config, device, deterministic)
        if verdict.ok:
            return implementation.name, "; ".join([verdict.reason, *refused])
        refused.append(f"{implementation.name}: {verdict.reason}")
    raise AssertionError(f"{name}: some implementation must run anywhere")


def _load(name: str, implementation: str) -> Callable:
    module = import_module(f"anabranch.ops.{_FOLDERS.get(name, name)}.{implementation}")
    return getattr(module, name)
