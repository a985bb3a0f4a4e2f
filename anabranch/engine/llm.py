"""Offline inference in the habit of this field: LLM(path).generate([...])."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from anabranch.config.fusion import FusionConfig
from anabranch.config.hf import load_model_config
from anabranch.engine.build import EngineOptions, Peers, build_runner
from anabranch.engine.engine import Engine
from anabranch.engine.joint import JointEngine
from anabranch.engine.ranks import muster
from anabranch.engine.request import Request, TokenLogprob
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.models.chat import ChatRenderer
from anabranch.models.tokenizer import Tokenizer, has_tokenizer
from anabranch.models.update import update_weights
from anabranch.parallel.layout import Layout


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
        tp: ranks of one pipeline stage, a GPU each. This process is rank 0 and starts the others, unless torchrun has
            started them all with the same arguments; then the other ranks compute until the job ends, and exit here.
        dp_attention: attention replicas that share the tp ranks; `max_seqs` is for each of them.
        ep: groups of ranks that each hold whole experts.
        pp: pipeline stages.
        rank_timeout: seconds that a rank may spend on one step before the job is ended.
        expert_load: count the tokens that each expert is given.
        ahead: launch a step before the samples of the last one are read; None does so on GPUs.

    Raises:
        ValueError: a wrong option, config or checkpoint; one line that names it.
        RankFailed: a rank ended, or hangs.
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
        tp: int = 1,
        dp_attention: int = 1,
        ep: int = 1,
        pp: int = 1,
        rank_timeout: float = 120.0,
        expert_load: bool = False,
        ahead: bool | None = None,
    ) -> None:
        options = EngineOptions(
            dtype=dtype,
            device=device,
            fusion=fusion,
            ops=ops,
            deterministic=deterministic,
            load_format=load_format,
            max_seqs=max_seqs,
            max_len=max_len,
            prefill_chunk=prefill_chunk,
            prefix_cache=prefix_cache,
            memory_fraction=memory_fraction,
            eager=eager,
            graph_sizes=graph_sizes,
            state_dtype=state_dtype,
            mla_norm_eps=mla_norm_eps,
            lora=lora,
            seed=seed,
            progress=progress,
            rank_timeout=rank_timeout,
            expert_load=expert_load,
            ahead=ahead,
        )
        self.path, self.lora = Path(model), None if lora is None else Path(lora)
        layout = Layout(tp=tp, dp_attention=dp_attention, ep=ep, pp=pp)
        if layout.world > 1:
            layout.check(load_model_config(self.path))
        self.tokenizer = None if load_format == "dummy" and not has_tokenizer(self.path) else Tokenizer.load(self.path)
        self.fleet = muster(layout, self.path, options) if layout.world > 1 else None
        try:
            self.engine = self._engine(options)
        except BaseException:
            self.close()
            raise
        self._ids = count()

    def _engine(self, options: EngineOptions) -> Engine:
        vocab, fleet = self.tokenizer.vocab_size if self.tokenizer else None, self.fleet
        if fleet is None:
            runner, self.memory, self.max_len = build_runner(self.path, options, Peers(), vocab)
            self.model = runner.model
            eos_ids, ahead = self.model.config.eos_ids, options.launches_ahead(runner.device)
            return Engine(runner, eos_ids, self.max_len, options.prefill_chunk, options.prefix_cache, ahead=ahead)
        peers = Peers(
            place=fleet.layout.rank(0),
            comm=fleet.comm,
            device=str(fleet.device),
            agree=lambda plan: (fleet.agree(plan, vocab), vocab),
        )
        try:
            runner, self.memory, self.max_len = build_runner(self.path, options, peers, vocab)
            fleet.ready()
        except (RuntimeError, OSError, EOFError) as error:
            raise fleet.hub.explain(error) from error
        self.model = runner.model
        eos_ids, ahead = self.model.config.eos_ids, options.launches_ahead(runner.device)
        return JointEngine(runner, fleet, eos_ids, self.max_len, options.prefill_chunk, options.prefix_cache, ahead)

    def expert_load(self) -> dict[int, list[int]]:
        """Layer -> tokens that each expert was given by all replicas; empty without the option `expert_load`."""
        total: dict[int, list[int]] = {}
        others = [] if self.fleet is None else self.fleet.call("expert_load")
        for load in (self.model.expert_load(), *others):
            for layer, counts in load.items():
                sums = total.get(layer, [0] * len(counts))
                total[layer] = [a + b for a, b in zip(sums, counts, strict=True)]
        return dict(sorted(total.items()))

    def close(self) -> None:
        """End the other ranks, if there are any; the LLM can compute no more then."""
        if self.fleet is None:
            return
        engine = getattr(self, "engine", None)  # not there when the start failed
        if isinstance(engine, JointEngine) and self.fleet.hub.failure is None and self.fleet.close.still_active():
            with suppress(RuntimeError, OSError, EOFError):
                engine.drain()
            # the groups must not be let go of before what was captured with them
            engine.runner.graphs = engine.runner.prompts = None
        self.fleet.close()

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

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

    def update_weights(self, weights: Iterable[tuple[str, torch.Tensor]] | Path) -> int:
        """Overwrite weights of the running model in place, all of them or none, and forget cached prefixes.

        Args:
            weights: (name, unsharded tensor), as in `models.update.update_weights`, or a checkpoint directory, which
                every rank reads by itself. What is not named stays.

        Returns:
            How many weights were written here; other ranks may hold others.

        Raises:
            ValueError: requests are running or waiting (their states belong to the old weights: finish or abort them
                first), or a name, shape, dtype or value is refused. The model is then unchanged.
        """
        if self.engine.busy:
            schedulers = [engine.scheduler for engine in self.engine.replicas]
            running, waiting = sum(len(s.running) for s in schedulers), sum(len(s.waiting) for s in schedulers)
            raise ValueError(
                f"update_weights: {running} requests are running and {waiting} waiting; finish or abort them first"
            )
        given = weights if isinstance(weights, Path) else list(weights)
        if self.fleet is not None:  # all ranks must take it before one writes
            update_weights(self.model, given, write=False)
            self.fleet.call("update_weights", given, False)
            self.fleet.call("update_weights", given, True)
        written = update_weights(self.model, given)
        self.engine.flush()
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
