"""One call from a checkpoint directory to a model that is ready to run."""

from collections.abc import Mapping
from pathlib import Path

import torch

from anabranch.config.fusion import FusionConfig
from anabranch.config.hf import load_model_config
from anabranch.config.parallel import ParallelConfig
from anabranch.models.checkpoint import detect_formats, load_checkpoint
from anabranch.models.dummy import load_dummy
from anabranch.models.inventory import DTYPES
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.lora import attach, read_adapter
from anabranch.parallel.collectives import Collectives

LOAD_FORMATS = ("auto", "safetensors", "dummy")


def load_model(
    path: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    fusion: FusionConfig | None = None,
    parallel: ParallelConfig | None = None,
    comm: Collectives | None = None,
    load_format: str = "auto",
    seed: int = 0,
    mla_norm_eps: float | None = None,
    deterministic: bool = False,
    ops: Mapping[str, str] | None = None,
    lora: str | Path | None = None,
    count_experts: bool = False,
    progress: bool | None = False,
) -> KimiForCausalLM:
    """Build one rank's model from `path` and fill it.

    Args:
        path: checkpoint directory; for dummy weights one with a config.json, or that file itself.
        dtype: "auto", "float32", "bfloat16" or "float16"; auto is the config's on CUDA and float32 on a CPU, where
            small bf16 GEMMs are slower.
        device: "auto", "cpu", "cuda" or "cuda:N"; auto is CUDA where there is one.
        fusion: projection path per layer kind.
        parallel: this rank's place; None is a single rank.
        comm: peers; None for a single rank.
        load_format: "auto" and "safetensors" read the checkpoint; "dummy" draws seeded random weights on the device.
            Experts are MXFP4 or plain, and weights block-FP8, by what the files hold; for dummy weights by the config.
        seed: of dummy weights.
        mla_norm_eps: eps of the MLA latent norms; None takes the config's, or the released code's 1e-6.
        deterministic: batch-invariant operations only.
        ops: implementation wishes, operation name -> implementation name.
        lora: directory of a PEFT LoRA adapter on attention projections.
        count_experts: keep counts of what each expert is given.
        progress: bar on stderr; None shows it on a terminal.

    Raises:
        ValueError: an unknown option (with the accepted values), an unusable config, layout or fusion path, a
            checkpoint fault as in `load_checkpoint`, or an adapter that does not fit as in `read_adapter`.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format={load_format!r}: accepted are {', '.join(LOAD_FORMATS)}")
    on = device_of(device)
    config = load_model_config(path, mla_norm_eps=mla_norm_eps)
    if load_format != "dummy":
        config = detect_formats(path, config)
    made_as = dtype_of(dtype, config.dtype, on)
    adapter = None if lora is None else read_adapter(lora, config)
    model = KimiForCausalLM(
        config,
        parallel=parallel,
        fusion=fusion,
        comm=comm,
        dtype=made_as,
        device=on,
        deterministic=deterministic,
        ops=ops,
        adapted=adapter.modules if adapter else (),
        count_experts=count_experts,
    ).eval()
    if load_format == "dummy":
        load_dummy(model, seed)
    else:
        load_checkpoint(model, path, progress=progress)
    if adapter:
        attach(model, adapter)
    return model


def device_of(name: str) -> torch.device:
    """The device of a `device` option. ValueError: an unknown one, or one that is not there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if name != "cpu" and not (kind == "cuda" and (number.isdecimal() or name == "cuda")):
        raise ValueError(f"device={name!r}: accepted are auto, cpu, cuda, cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"device={name!r}: this machine has {torch.cuda.device_count()} CUDA devices")
    return torch.device(name)


def dtype_of(name: str, config_dtype: str, device: torch.device) -> torch.dtype:
    """The dtype of a `dtype` option for a model whose config names `config_dtype`. ValueError: an unknown one."""
    if name == "auto":
        name = config_dtype.removeprefix("torch.") if device.type == "cuda" else "float32"
        if name not in DTYPES:
            raise ValueError(f"the config's dtype is {name!r}; choose one of {', '.join(DTYPES)}")
    elif name not in DTYPES:
        raise ValueError(f"dtype={name!r}: accepted are auto, {', '.join(DTYPES)}")
    return DTYPES[name]
