"""Offline inference in the habit of this field: LLM(path).generate([...])."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch

from anabranch.config.fusion import FusionConfig
from anabranch.engine.cache import Cache, CacheShape, pages_for
from anabranch.engine.engine import Engine
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.models.chat import ChatRenderer
from anabranch.models.load import load_model
from anabranch.models.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One answer. `logprobs[i]` belongs to `token_ids[i]`; `top_logprobs[i]` maps its alternatives to theirs.

    `finish_reason`: "stop" (an end token or stop string), "length" or "abort".
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: str | None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A prompt, its answer, and seconds: to the first token, and from arrival to the end."""

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    time_to_first_token: float
    seconds: float


class LLM:
    """A loaded model with its tokenizer and engine.

    Args:
        model: checkpoint directory (config.json alone is enough with load_format="dummy").
        dtype: "auto", "float32", "bfloat16" or "float16"; auto is the checkpoint's on CUDA and float32 on a CPU.
        device: "auto", "cpu", "cuda" or "cuda:N".
        fusion: projection path per layer kind.
        load_format: "auto" or "dummy" (seeded random weights, made on the device).
        max_seqs: requests computed at the same time.
        max_len: longest prompt plus answer in tokens; at most the model's context.
        prefill_chunk: prompt tokens computed in one step.
        mla_norm_eps: eps of the MLA latent norms; None takes the released code's 1e-6 (SGLang and vLLM use 1e-5).
        seed: of dummy weights.
        progress: show a progress bar while loading.

    Raises:
        ValueError: a wrong option, config or checkpoint; one line that names it.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        dtype: str = "auto",
        device: str = "auto",
        fusion: FusionConfig | None = None,
        load_format: str = "auto",
        max_seqs: int = 16,
        max_len: int = 4096,
        prefill_chunk: int = 2048,
        state_dtype: str = "float32",
        mla_norm_eps: float | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        for name, value in (("max_seqs", max_seqs), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"{name}={value}: need at least 1")
        if state_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"state_dtype={state_dtype!r}: accepted are float32, bfloat16")
        self.path = Path(model)
        self.tokenizer = Tokenizer.load(self.path)
        self.model = load_model(
            self.path,
            dtype=dtype,
            device=device,
            fusion=fusion,
            load_format=load_format,
            seed=seed,
            mla_norm_eps=mla_norm_eps,
            progress=progress,
        )
        config, parallel = self.model.config, self.model.parallel
        self.max_len = min(max_len, config.max_context)
        on = next(self.model.parameters()).device
        shape = CacheShape.of(config, parallel, self.model.dtype, getattr(torch, state_dtype))
        pages = max_seqs * pages_for(self.max_len)
        cache = Cache(config, parallel, shape, slots=max_seqs, pages=pages, device=on)
        self.engine = Engine(Runner(self.model, cache, on), config.eos_ids, self.max_len, prefill_chunk)
        self._ids = count()

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Answer every prompt (text or token ids), batched; results in the order of the prompts."""
        if isinstance(prompts, str):
            prompts = [prompts]
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling params for {len(prompts)} prompts; need one for all, or one each")
        requests = [self._request(p, each[i]) for i, p in enumerate(prompts)]
        for request in requests:
            self.engine.add(request)
        while self.engine.busy:
            self.engine.step()
        return [self._output(p if isinstance(p, str) else None, r) for p, r in zip(prompts, requests, strict=True)]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[str | RequestOutput]:
        """Pieces of text as they become certain, then the whole RequestOutput. Closing the iterator aborts."""
        request = self._request(prompt, params or SamplingParams())
        self.engine.add(request)
        try:
            while request.finish_reason is None:
                self.engine.step()
                if piece := request.text.take():
                    yield piece
        finally:
            if request.finish_reason is None:
                self.engine.abort(request)
        yield self._output(prompt if isinstance(prompt, str) else None, request)

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation in the model's own chat format; options as in `ChatRenderer.render`."""
        renderer = ChatRenderer.load(self.path, self.tokenizer, self.model.config.architecture)
        return renderer.render(messages, **options)

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The assistant's next turn."""
        return self.generate([self.chat_prompt(messages, **options)], params)[0]

    def _request(self, prompt: str | Sequence[int], params: SamplingParams) -> Request:
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        wrong = [t for t in ids if not 0 <= t < self.model.config.vocab_size]
        if wrong:
            raise ValueError(f"token id {wrong[0]} is outside the vocabulary 0..{self.model.config.vocab_size - 1}")
        text = TextStream(self.tokenizer.stream(), params.stop)
        return Request(id=next(self._ids), prompt=ids, params=params, text=text)

    def _output(self, prompt: str | None, r: Request) -> RequestOutput:
        assert r.finished is not None
        answer = CompletionOutput(
            text=r.text.text,
            token_ids=r.output,
            logprobs=[s.logprob for s in r.sampled],
            top_logprobs=[s.top for s in r.sampled],
            finish_reason=r.finish_reason,
        )
        return RequestOutput(
            prompt=prompt,
            prompt_token_ids=r.prompt,
            outputs=[answer],
            time_to_first_token=(r.first_token or r.finished) - r.arrived,
            seconds=r.finished - r.arrived,
        )
