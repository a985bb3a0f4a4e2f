"""One way to run an operation, and whether it may run for a model, on a device, in a mode."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch

from anabranch.config.model import ModelConfig
from anabranch.config.verdict import Verdict
from anabranch.ops import native


@dataclass(frozen=True, kw_only=True, slots=True)
class Implementation:
    """One way to run an operation, in the module `ops/<folder>/<name>.py`.

    `batch_invariant`: a row's bits do not depend on the other rows, so deterministic mode may use it. `fits` says
    whether a model's shapes are ones it was made for, `dtypes` names the model dtypes it computes in. `native` is the
    folder whose CUDA C++ it loads: it needs a Hopper GPU and a built or buildable library. `layout`: what a prefill
    kernel reads (ops/kda_inputs); `saves`: it stores states on the way through a prompt. `alone`: it cannot be where
    the rows of attention replicas join.
    """

    name: str
    batch_invariant: bool = False
    device: str | None = None
    package: str | None = None
    dtypes: tuple[torch.dtype, ...] | None = None
    fits: Callable[[ModelConfig], Verdict] | None = None
    native: str | None = None
    layout: str = "normed"
    saves: bool = False
    alone: bool = False

    def verdict(
        self,
        config: ModelConfig | None,
        device: torch.device,
        deterministic: bool,
        dtype: torch.dtype = torch.bfloat16,
        replicas: int = 1,
    ) -> Verdict:
        """Whether this implementation may run here, where the ranks hold so many attention replicas."""
        if deterministic and not self.batch_invariant:
            return Verdict(False, "not batch-invariant")
        if self.device is not None and device.type != self.device:
            return Verdict(False, f"needs {self.device}")
        if self.package is not None and find_spec(self.package) is None:
            return Verdict(False, f"needs the package {self.package}")
        if self.alone and replicas > 1:
            return Verdict(False, f"cannot be where the rows of attention replicas join, there are {replicas}")
        if self.dtypes is not None and dtype not in self.dtypes:
            return Verdict(False, f"does not compute in {str(dtype).removeprefix('torch.')}")
        if self.native is not None and not (verdict := _native(self.native, device)).ok:
            return verdict
        if self.fits is not None and config is not None and not (verdict := self.fits(config)).ok:
            return verdict
        return Verdict(True, "first that fits")


def _native(folder: str, device: torch.device) -> Verdict:
    capability = torch.cuda.get_device_capability(device) if torch.cuda.is_available() else None
    if capability != (9, 0):
        found = f"this one is sm_{capability[0]}{capability[1]}" if capability else "there is none"
        return Verdict(False, f"needs a Hopper GPU (sm_90), {found}")
    return native.verdict(folder)
