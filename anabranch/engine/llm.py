"""Offline inference in the habit of this field: LLM(path).generate([...])."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from anabranch.config.fusion import FusionConfig
from anabranch.engine.cache import CacheShape
from anabranch.engine.engine import Engine
from anabranch.engine.graphs import DecodeGraphs, graph_ladder
from anabranch.engine.memory import make_cache, plan_memory
from anabranch.engine.request import Request, TokenLogprob
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.engine.warmup import warm_up
from anabranch.models.chat import ChatRenderer
from anabranch.models.kimi import KimiForCausalLM
from anabranch.models.load import load_model
from anabranch.models.tokenizer import Tokenizer, has_tokenizer
from anabranch.models.update import update_weights


@dataclass(frozen=True, kw_only=True, slots=True)
class CompletionOutput:
    """One answer. `logprobs[i]` belongs to `token_ids[i]`; `top_logprobs[i]` maps its alternatives to theirs.

    `finish_reason`: "stop" (an end token or stop string), "length", "abort", or "error" with its reason in `error`.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: list[dict[int, float]]
    finish_reason: str | None
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RequestOutput:
    """A prompt, its answer, and seconds: to the first token, and from arrival to the end.

    `prompt_logprobs` is empty unless it was asked for; `cached_tokens` of the prompt were not computed again.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[TokenLogprob]
    cached_tokens: int
    outputs: list[CompletionOutput]
    time_to_first_token: float
    seconds: float


class LLM:
    """A loaded model with its tokenizer and engine.

    Args:
        model: checkpoint directory. Dummy weights need a config.json alone; prompts are then token ids.
        dtype: "auto", "float32", "bfloat16" or "float16"; auto is the checkpoint's on CUDA and float32 on a CPU.
        device: "auto", "cpu", "cuda" or "cuda:N".
        fusion: projection path per layer kind.
        ops: implementation per operation, e.g. {"mla_decode": "reference"}.
        deterministic: batch-invariant operations only: a request's bits depend on the request alone.
        load_format: "auto", "safetensors" or "dummy" (seeded random weights, made on the device).
        max_seqs: requests computed at the same time.
        max_len: longest prompt plus answer in tokens; at most the model's context.
        prefill_chunk: prompt tokens computed in one step.
        prefix_cache: reuse latent pages and saved states of earlier prompts.
        memory_fraction: share of the device that model and cache may take.
        eager: no CUDA graphs.
        graph_sizes: decode batch sizes that get a graph; None takes a ladder up to max_seqs.
        state_dtype: "float32" or "bfloat16" for the recurrent state.
        mla_norm_eps: eps of the MLA latent norms; None takes the released code's 1e-6 (SGLang and vLLM use 1e-5).
        lora: directory of a PEFT LoRA adapter on attention projections, applied to every request.
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
        ops: Mapping[str, str] | None = None,
        deterministic: bool = False,
        load_format: str = "auto",
        max_seqs: int = 16,
        max_len: int = 4096,
        prefill_chunk: int = 2048,
        prefix_cache: bool = True,
        memory_fraction: float = 0.9,
        eager: bool = False,
        graph_sizes: Sequence[int] | None = None,
        state_dtype: str = "float32",
        mla_norm_eps: float | None = None,
        lora: str | Path | None = None,
        seed: int = 0,
        progress: bool = False,
    ) -> None:
        for name, value in (("max_seqs", max_seqs), ("max_len", max_len)):
            if value < 1:
                raise ValueError(f"{name}={value}: need at least 1")
        if state_dtype not in ("float32", "bfloat16"):
            raise ValueError(f"state_dtype={state_dtype!r}: accepted are float32, bfloat16")
        self.path = Path(model)
        self.tokenizer = None if load_format == "dummy" and not has_tokenizer(self.path) else Tokenizer.load(self.path)
        self.model = load_model(
            self.path,
            dtype=dtype,
            device=device,
            fusion=fusion,
            ops=ops,
            deterministic=deterministic,
            load_format=load_format,
            seed=seed,
            mla_norm_eps=mla_norm_eps,
            lora=lora,
            progress=progress,
        )
        self.max_len = min(max_len, self.model.config.max_context)
        runner = self._runner(max_seqs, prefill_chunk, prefix_cache, memory_fraction, getattr(torch, state_dtype))
        if on_cuda(self.model) and not eager:
            sizes = graph_sizes or graph_ladder(max_seqs)
            runner.graphs = DecodeGraphs(self.model, runner.cache, runner.device, sizes, self.max_len)
            runner.graphs.capture()
        self.engine = Engine(runner, self.model.config.eos_ids, self.max_len, prefill_chunk, prefix_cache)
        self._ids = count()

    def _runner(
        self, max_seqs: int, prefill_chunk: int, prefix_cache: bool, memory_fraction: float, state_dtype: torch.dtype
    ) -> Runner:
        """Warm everything up, then give the cache what is left."""
        shape = CacheShape.of(self.model.config, self.model.parallel, self.model.dtype, state_dtype)
        reserve = 0
        if on_cuda(self.model):
            reserve = warm_up(self.model, shape, prefill_chunk=min(prefill_chunk, self.max_len), max_seqs=max_seqs)
        self.memory = plan_memory(
            self.model,
            shape,
            max_seqs=max_seqs,
            max_len=self.max_len,
            memory_fraction=memory_fraction,
            prefix_cache=prefix_cache,
            reserve=reserve,
        )
        vocab = self.tokenizer.vocab_size if self.tokenizer else None
        return Runner(self.model, make_cache(self.model, shape, self.memory), vocab)

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
        groups = [self._answers(p, each[i]) for i, p in enumerate(prompts)]
        for request in (r for group in groups for r in group):
            self.engine.add(request)
        while self.engine.busy:
            self.engine.step()
        return [
            self._output(p if isinstance(p, str) else None, group) for p, group in zip(prompts, groups, strict=True)
        ]

    def _answers(self, prompt: str | Sequence[int], params: SamplingParams) -> list[Request]:
        """`params.n` requests for one prompt."""
        seeds = [None if params.seed is None else params.seed + i for i in range(params.n)]
        return [self.request(prompt, replace(params, n=1, seed=seed)) for seed in seeds]

    def stream(
        self, prompt: str | Sequence[int], params: SamplingParams | None = None
    ) -> Iterator[str | RequestOutput]:
        """Pieces of text as they become certain, then the whole RequestOutput. Closing the iterator aborts."""
        params = params or SamplingParams()
        if params.n != 1:
            raise ValueError(f"n={params.n}: one answer can be streamed at a time")
        request = self.request(prompt, params)
        self.engine.add(request)
        try:
            while request.finish_reason is None:
                self.engine.step()
                if piece := request.text.take():
                    yield piece
        finally:
            self.engine.abort(request)
        yield self._output(prompt if isinstance(prompt, str) else None, [request])

    def chat_prompt(self, messages: Sequence[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation in the model's own chat format; options as in `ChatRenderer.render`."""
        if self.tokenizer is None:
            raise ValueError(f"{self.path}: no tokenizer, so no chat format")
        renderer = ChatRenderer.load(self.path, self.tokenizer, self.model.config.architecture)
        return renderer.render(messages, **options)

    def chat(
        self, messages: Sequence[dict[str, Any]], params: SamplingParams | None = None, **options: Any
    ) -> RequestOutput:
        """The assistant's next turn."""
        return self.generate([self.chat_prompt(messages, **options)], params)[0]

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> int:
        """Overwrite weights of the running model in place, all of them or none, and forget cached prefixes.

        Args:
            weights: (name, unsharded tensor), as in `models.update.update_weights`. What is not named stays.

        Returns:
            How many weights were written.

        Raises:
            ValueError: requests are running or waiting (their states belong to the old weights: finish or abort them
                first), or a name, shape, dtype or value is refused. The model is then unchanged.
        """
        if self.engine.busy:
            scheduler = self.engine.scheduler
            raise ValueError(
                f"update_weights: {len(scheduler.running)} requests are running and {len(scheduler.waiting)} waiting; "
                "finish or abort them first"
            )
        written = update_weights(self.model, weights)
        if self.engine.scheduler.prefix is not None:
            self.engine.scheduler.prefix.flush()
        return written

    def request(self, prompt: str | Sequence[int], params: SamplingParams, *, skip_special: bool = True) -> Request:
        """A request for the engine; `skip_special` leaves special tokens out of its text.

        Raises:
            ValueError: a token id outside the vocabulary, or text without a tokenizer.
        """
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"{self.path}: no tokenizer; give the prompt as token ids")
            ids = self.tokenizer.encode(prompt)
        else:
            ids = list(prompt)
        self.engine.limits.check_ids(ids, params)
        decoder = self.tokenizer.stream(skip_special=skip_special) if self.tokenizer else None
        return Request(id=next(self._ids), prompt=ids, params=params, text=TextStream(decoder, params.stop))

    def _output(self, prompt: str | None, answers: list[Request]) -> RequestOutput:
        first = answers[0]
        return RequestOutput(
            prompt=prompt,
            prompt_token_ids=first.prompt,
            prompt_logprobs=first.prompt_logprobs,
            cached_tokens=first.cached_tokens,
            outputs=[
                CompletionOutput(
                    text=r.text.text,
                    token_ids=r.output,
                    logprobs=[s.logprob for s in r.sampled],
                    top_logprobs=[s.top for s in r.sampled],
                    finish_reason=r.finish_reason,
                    error=r.error,
                )
                for r in answers
            ],
            time_to_first_token=min((r.first_token or r.finished or 0.0) - r.arrived for r in answers),
            seconds=max((r.finished or 0.0) - r.arrived for r in answers),
        )


def on_cuda(model: KimiForCausalLM) -> bool:
    """Whether a model's weights live on a GPU."""
    return next(model.parameters()).is_cuda
