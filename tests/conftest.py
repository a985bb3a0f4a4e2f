"""Every test runs on one thread and with poisoned memory: what is read before it was written becomes NaN."""

import signal
from pathlib import Path

import pytest
import torch

from anabranch.config.hf import load_model_config
from anabranch.config.model import ModelConfig

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # a shell's background job ignores Ctrl-C, and so would every process that a test starts
    signal.signal(signal.SIGINT, signal.default_int_handler)


CONFIGS = Path(__file__).parent / "data" / "configs"


@pytest.fixture(scope="session")
def real_kl() -> ModelConfig:
    """The config of the released Kimi-Linear-48B-A3B."""
    return load_model_config(CONFIGS / "kimi_linear_48b_config.json")


@pytest.fixture(scope="session")
def real_k3() -> ModelConfig:
    """The config of the released Kimi-K3."""
    return load_model_config(CONFIGS / "kimi_k3_config.json")


@pytest.fixture(autouse=True)
def _poisoned_memory(monkeypatch):
    def poison(make):
        def made(*args, **kwargs):
            t = make(*args, **kwargs)
            if t.device.type != "meta":
                if t.is_floating_point():
                    t.fill_(float("nan"))
                elif t.dtype == torch.uint8:
                    t.fill_(255)
            return t

        return made

    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


@pytest.fixture
def double_precision(monkeypatch):
    """All arithmetic in fp64, also where code asks for fp32: what remains of a difference is a wrong formula."""
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)
