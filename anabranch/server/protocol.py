"""Request bodies. Unknown fields are ignored, as OpenAI does, and logged once; types are strict, ranges are checked."""

import logging
from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, model_validator

from anabranch.engine.sampling import SamplingParams
from anabranch.server.errors import refusing

Int = Annotated[int, Field(ge=-(2**31), lt=2**31)]
# torch's range of seeds, less the largest n
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
MAX_CHOICES = 128
_LOGGED_NAMES = 100

_logger = logging.getLogger(__name__)
_logged: set[str] = set()


class Body(BaseModel):
    """Base of all request bodies."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="after")
    def _log_unknown(self) -> "Body":
        for name in self.model_extra or ():
            if name not in _logged and len(_logged) < _LOGGED_NAMES:
                _logged.add(name)
                _logger.warning("ignoring the unknown request field %.80r", name)
        return self


class StreamOptions(Body):
    """`include_usage`: a last chunk with the usage; `continuous_usage_stats`: the usage so far on every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


def _prompts(value: Any) -> list[str | list[int]]:
    """The four forms of a prompt, as a list of texts and id lists."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in value):
            return value
    raise ValueError("need a string, a list of strings, a list of token ids, or a list of lists of token ids")


_IDS = {"type": "array", "items": {"type": "integer"}}
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
Prompts = Annotated[
    list[Any],
    BeforeValidator(_prompts),
    WithJsonSchema(
        {"anyOf": [{"type": "string"}, _TEXTS, _IDS | {"minItems": 1}, {"type": "array", "items": _IDS, "minItems": 1}]}
    ),
]


class Generation(Body):
    """What /v1/completions and /v1/chat/completions have in common; names beyond OpenAI's are vLLM's."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[Int, Field(ge=0)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    ignore_eos: bool | None = None
    min_tokens: Int | None = None
    skip_special_tokens: bool | None = None
    return_token_ids: bool | None = None

    @model_validator(mode="after")
    def _options_need_a_stream(self) -> "Generation":
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @property
    def choices(self) -> int:
        return self.n or 1

    @property
    def usage_chunks(self) -> tuple[bool, bool]:
        """Whether to end with the usage, and whether to put it on every chunk."""
        options = self.stream_options or StreamOptions()
        return bool(options.include_usage), bool(options.include_usage and options.continuous_usage_stats)

    def sampling(
        self, *, max_tokens: int, logprobs: int | None, prompt_logprobs: int | None = None
    ) -> list[SamplingParams]:
        """Parameters of each of the `n` answers to one prompt; with a seed, answer i takes seed + i.

        Raises:
            ApiError: 400, a value is out of range.
        """
        names = ("temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty")
        names += ("repetition_penalty", "ignore_eos", "min_tokens")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        seeds = [None if self.seed is None else self.seed + i for i in range(self.choices)]
        with refusing(list(type(self).model_fields)):
            return [
                SamplingParams(
                    max_tokens=max_tokens,
                    logprobs=logprobs,
                    prompt_logprobs=prompt_logprobs,
                    seed=seed,
                    stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
                    stop_token_ids=tuple(self.stop_token_ids or ()),
                    logit_bias=_biases(self.logit_bias or {}),
                    **given,
                )
                for seed in seeds
            ]


def _biases(given: dict[str, float]) -> dict[int, float]:
    for name, bias in given.items():
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise ValueError(f"logit_bias has the key {name!r}: need a token id")
        if not -100 <= bias <= 100:
            raise ValueError(f"logit_bias of token {name} is {bias}: need -100..100")
    return {int(name): bias for name, bias in given.items()}


class CompletionRequest(Generation):
    """POST /v1/completions."""

    prompt: Prompts
    echo: bool | None = None
    logprobs: Int | None = None
    suffix: str | None = None
    best_of: Int | None = None

    @model_validator(mode="after")
    def _check(self) -> "CompletionRequest":
        if self.suffix:
            raise ValueError("suffix is not supported: the models do not fill in the middle")
        if self.best_of not in (None, self.choices):
            raise ValueError(f"best_of={self.best_of} is not supported: need n or nothing")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens=0 needs echo=true, as there is nothing else to return")
        return self

    def params(self) -> list[SamplingParams]:
        """Parameters of the answers to one prompt; ApiError 400 as of `sampling`."""
        max_tokens = 16 if self.max_tokens is None else self.max_tokens
        # without an answer to compute, the prompt is still run once: it may be too long, or have unknown ids
        wanted = self.logprobs if self.logprobs is not None or max_tokens else 0
        return self.sampling(
            max_tokens=max_tokens, logprobs=self.logprobs, prompt_logprobs=wanted if self.echo else None
        )


class ChatRequest(Generation):
    """POST /v1/chat/completions. Messages, tools and tool_choice are checked by the model's chat format."""

    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[Int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    response_format: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None

    @model_validator(mode="after")
    def _check(self) -> "ChatRequest":
        kind = (self.response_format or {"type": "text"}).get("type")
        if kind != "text":
            raise ValueError(f"response_format of type {kind!r} is not supported; accepted: text")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        if self.parallel_tool_calls is False and self.tools:
            raise ValueError("parallel_tool_calls=false is not supported: the model decides how many calls it makes")
        if self.functions is not None or self.function_call is not None:
            raise ValueError("functions and function_call are not supported; use tools and tool_choice")
        unknown = set(self.chat_template_kwargs or ()) - {"thinking", "thinking_effort"}
        if unknown:
            raise ValueError(f"chat_template_kwargs has {min(unknown)!r}; accepted: thinking, thinking_effort")
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens of the answer; None is as many as fit."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def may_call(self) -> bool:
        """Whether the answer may hold tool calls."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def thinking(self) -> tuple[bool | None, str | None]:
        """Whether to think, and how hard; None is the model's default.

        Raises:
            ValueError: a template option of the wrong type, or one that contradicts `reasoning_effort`.
        """
        options = self.chat_template_kwargs or {}
        thinking, effort = options.get("thinking"), options.get("thinking_effort")
        if not isinstance(thinking, bool | None) or not isinstance(effort, str | None):
            raise ValueError("chat_template_kwargs: need thinking as true or false, thinking_effort as a string")
        wish = self.reasoning_effort
        if wish is not None and effort not in (None, wish):
            raise ValueError(f"reasoning_effort={wish!r} contradicts thinking_effort={effort!r}")
        if wish == "none" and thinking:
            raise ValueError("reasoning_effort='none' contradicts thinking=true")
        return (False, None) if wish == "none" else (thinking, effort or wish)

    def params(self, room: int) -> list[SamplingParams]:
        """Parameters of the answers; `room` is what the context leaves for one. ApiError 400 as of `sampling`."""
        limit = max(room, 1) if self.limit is None else self.limit
        return self.sampling(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


class TokenizeRequest(Body):
    """POST /tokenize: a text, or the messages of a conversation."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    # no Kimi format begins a plain text with a special token, so either value means the same
    add_special_tokens: bool | None = None
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of(self) -> "TokenizeRequest":
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("need exactly one of prompt and messages")
        return self


class UpdateWeightsRequest(Body):
    """POST /update_weights_from_disk, with SGLang's names."""

    model_path: str
    load_format: str | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True
    weight_version: str | None = None

    @model_validator(mode="after")
    def _check(self) -> "UpdateWeightsRequest":
        if self.load_format not in (None, "auto", "safetensors"):
            raise ValueError(f"load_format={self.load_format!r}: accepted are auto, safetensors")
        if not self.flush_cache:
            raise ValueError("flush_cache=false: cached prefixes belong to the old weights and are always forgotten")
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Sequence[int]
    skip_special_tokens: bool = False
