"""Anabranch: an inference engine for the Kimi hybrid-attention family whose fusions are proven exact.

from anabranch import LLM, SamplingParams
LLM("tiny-k3").generate(["Hello"], SamplingParams(max_tokens=32))
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anabranch.config.fusion import FusionConfig
    from anabranch.engine.llm import LLM
    from anabranch.engine.sampling import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "FusionConfig", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "anabranch.engine.llm",
    "SamplingParams": "anabranch.engine.sampling",
    "FusionConfig": "anabranch.config.fusion",
}


def __getattr__(name: str) -> Any:
    """Public names are imported when they are first asked for, so that `anabranch --help` does not wait for torch."""
    if name not in _HOMES:
        raise AttributeError(f"module 'anabranch' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
