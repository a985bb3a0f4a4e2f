"""Chat messages to token ids: Kimi-Linear by its Jinja template, Kimi-K3 by pieces (`chat_k3`).

In both formats special ids come from the format alone. Whatever a user, a tool or a schema contains is plain text.
Source: Kimi-Linear chat template and released tokenizer code; Kimi-K3 released tokenizer code.
"""

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Self

import jinja2
import jinja2.meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from anabranch.models import chat_k3
from anabranch.models.chat_k3 import Piece
from anabranch.models.tiktoken_convert import read_config
from anabranch.models.tokenizer import Tokenizer

ARCHITECTURES = ("kimi_linear", "kimi_k3")
ROLES = ("system", "developer", "user", "assistant", "tool")

# Used when the checkpoint brings no template of its own.
KIMI_LINEAR_TEMPLATE = """
{%- if tools -%}
  <|im_system|>tool_declare<|im_middle|>{{ tools | tojson(separators=(",", ":")) }}<|im_end|>
{%- endif -%}
{%- for message in messages -%}
  {%- if message.role == "user" -%}<|im_user|>
  {%- elif message.role == "assistant" -%}<|im_assistant|>
  {%- else -%}<|im_system|>
  {%- endif -%}
  {{- message.name or message.role }}<|im_middle|>
  {%- if message.role == "tool" -%}
    {{- "## Return of " ~ (message.tool_call_id or raise_exception("a tool message needs tool_call_id")) ~ "\\n" }}
  {%- endif -%}
  {{- message.content or "" }}
  {%- if message.tool_calls -%}
    <|tool_calls_section_begin|>
    {%- for call in message.tool_calls -%}
      <|tool_call_begin|>{{ call.id or raise_exception("a tool call needs an id") }}<|tool_call_argument_begin|>
      {%- set arguments = call.function.arguments -%}
      {{- arguments if arguments is string else (arguments or {}) | tojson }}<|tool_call_end|>
    {%- endfor -%}
    <|tool_calls_section_end|>
  {%- endif -%}
  <|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}
"""


class ChatRenderer:
    """Renders conversations of one checkpoint; make it with `load`."""

    def __init__(self, tokenizer: Tokenizer, template: "MarkedTemplate | None") -> None:
        """`template`: the Jinja template of a Kimi-Linear checkpoint, None for Kimi-K3."""
        if template is None and (missing := [name for name in chat_k3.MARKERS if name not in tokenizer.special_ids]):
            raise ValueError(f"the tokenizer has no {', '.join(missing)}, which the kimi_k3 chat format needs")
        self._tokenizer = tokenizer
        self._template = template

    @classmethod
    def load(cls, path: str | Path, tokenizer: Tokenizer, architecture: str) -> Self:
        """`architecture`: "kimi_linear" or "kimi_k3".

        A Kimi-Linear template is `chat_template.jinja`, else `chat_template` of `tokenizer_config.json`, else the
        built-in one. ValueError: unknown architecture, malformed template, a marker that the tokenizer lacks.
        """
        if architecture not in ARCHITECTURES:
            raise ValueError(f"unknown architecture {architecture!r}; accepted: {', '.join(ARCHITECTURES)}")
        if architecture == "kimi_k3":
            return cls(tokenizer, None)
        source = _find_template(Path(path))
        if source is None:
            source = KIMI_LINEAR_TEMPLATE
            missing = [name for name in re.findall(r"<\|\w+\|>", source) if name not in tokenizer.special_ids]
            if missing:
                raise ValueError(f"the tokenizer has no {missing[0]}, which the built-in kimi_linear template needs")
        return cls(tokenizer, MarkedTemplate(source, tokenizer))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        thinking: bool | None = None,
        thinking_effort: str | None = None,
        tool_choice: str | Mapping[str, Any] | None = None,
        response_format: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of the conversation (OpenAI message objects).

        `thinking`: None is the model's default (Kimi-K3 thinks, Kimi-Linear has no thinking channel).
        `thinking_effort`: low, high or max, None is max; without effect while thinking is off.
        ValueError in one line: a malformed message, an unknown value, an option the format cannot express.
        """
        checked = _check_request(messages, tools, response_format)
        if self._template is not None:
            options = {
                "thinking": thinking,
                "thinking_effort": thinking_effort,
                "tool_choice": tool_choice,
                "response_format": response_format,
            }
            pieces = self._template.render_pieces(checked, tools, add_generation_prompt, options)
        else:
            pieces = chat_k3.render_pieces(
                checked,
                tools=tools,
                add_generation_prompt=add_generation_prompt,
                thinking=thinking is not False,
                effort=thinking_effort,
                tool_choice=tool_choice,
                response_format=response_format,
            )
        return [token_id for piece in pieces for token_id in self._encode(piece)]

    def _encode(self, piece: Piece) -> list[int]:
        return [self._tokenizer.special_ids[piece.text]] if piece.marker else self._tokenizer.encode(piece.text)


class MarkedTemplate:
    """A chat template whose special tokens are told from user text.

    The special names in the template's source are replaced by random marks before it is compiled, so a mark in the
    rendered text was put there by the template; a special name in it can only have come from outside.
    """

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        names = sorted(tokenizer.special_ids, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or r"(?!)")
        nonce = secrets.token_hex(16)
        self._mark = re.compile(f"{nonce}x([0-9]+)x")
        self._names = {str(token_id): name for name, token_id in tokenizer.special_ids.items()}
        marks = {name: f"{nonce}x{token_id}x" for name, token_id in tokenizer.special_ids.items()}
        marked = self._special.sub(lambda found: marks[found.group()], source)
        environment = _environment()
        try:
            self._template = environment.from_string(marked)
            self._variables = jinja2.meta.find_undeclared_variables(environment.parse(marked))
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"chat template, line {error.lineno}: {error.message}") from error
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
        self._tokens = {key: marks[self._names[str(token_id)]] for key, token_id in ids.items() if token_id is not None}

    def render_pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        options: Mapping[str, Any],
    ) -> list[Piece]:
        """The rendered conversation, cut at its special tokens. ValueError: an option that the template ignores."""
        known = self._known_options(options)
        if options["tool_choice"] == "none" and "tool_choice" not in self._variables:
            tools = None
        if tools and "tools" not in self._variables:
            raise ValueError("this chat template has no place for tools")
        texts = [{**message, "content": _join(message["content"])} for message in messages]
        # the released tokenizer sorts the keys of tools, at every depth, before its template sees them
        sorted_tools = json.loads(json.dumps(tools, sort_keys=True)) if tools else None
        try:
            rendered = self._template.render(
                messages=texts, tools=sorted_tools, add_generation_prompt=add_generation_prompt, **self._tokens, **known
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"chat template: {error}") from error
        # split by a pattern with one group: plain text and ids of special tokens take turns
        parts = self._mark.split(rendered)
        self._refuse_built_specials(parts[::2], [texts, sorted_tools])
        pieces = [Piece(self._names[part], True) if index % 2 else Piece(part) for index, part in enumerate(parts)]
        return [piece for piece in pieces if piece.text]

    def _known_options(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """Options that the template reads; any other must be at a value that asks for nothing."""
        response_format = options["response_format"] or {}
        idle = {
            "thinking": not options["thinking"],
            "thinking_effort": options["thinking_effort"] is None,
            "tool_choice": options["tool_choice"] in (None, "auto", "none"),
            "response_format": response_format.get("type", "text") == "text",
        }
        for name, value in options.items():
            if name not in self._variables and not idle[name]:
                raise ValueError(f"this chat template has no {name}; got {value!r}")
        return {name: value for name, value in options.items() if name in self._variables and value is not None}

    def _refuse_built_specials(self, stretches: Sequence[str], sources: object) -> None:
        found = {name for stretch in stretches for name in self._special.findall(stretch)}
        given = json.dumps(sources, ensure_ascii=False, default=str) if found else ""
        for name in found:
            if name not in given:
                raise ValueError(f"the chat template puts {name!r} together from parts; it has to be written as one")


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: Hugging Face's white-space rules and helper functions, sandboxed."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes < > & ' for HTML, which models were not trained on
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _find_template(directory: Path) -> str | None:
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    if not (directory / "tokenizer_config.json").is_file():
        return None
    template = read_config(directory).get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            raise ValueError(f"{directory}/tokenizer_config.json: chat_template has no 'default' among {list(named)}")
        return named["default"]
    return template


def _check_request(
    messages: Sequence[Mapping[str, Any]], tools: object, response_format: object
) -> list[dict[str, Any]]:
    """The messages, each checked by `_check_message`."""
    if not messages:
        raise ValueError("messages is empty")
    if tools is not None and not (isinstance(tools, Sequence) and all(isinstance(tool, Mapping) for tool in tools)):
        raise ValueError("tools must be a list of objects")
    if not isinstance(response_format, Mapping | None):
        raise ValueError(f"response_format must be an object, not {type(response_format).__name__}")
    return [_check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _check_message(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A copy with a known role and `content` as a tuple of texts, or None where an assistant only calls tools."""
    if not isinstance(message, Mapping):
        raise ValueError(f"{where} must be an object, not {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where} has role {role!r}; accepted: {', '.join(ROLES)}")
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, Sequence):
        raise ValueError(f"{where}.tool_calls must be a list, not {type(calls).__name__}")
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise ValueError(f"{where}.tool_calls[{index}] needs function.name")
    content = message.get("content")
    if content is None and not (role == "assistant" and calls):
        raise ValueError(f"{where} ({role}) has no content")
    parts = None if content is None else tuple(_text_parts(content, where))
    # "developer" is OpenAI's later name of the system role
    return {**message, "role": "system" if role == "developer" else role, "content": parts}


def _text_parts(content: object, where: str) -> Iterator[str]:
    if isinstance(content, str):
        yield content
        return
    if not isinstance(content, Sequence):
        raise ValueError(f"{where}.content must be a string or a list of parts, not {type(content).__name__}")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise ValueError(f"{where} has a content part of type {kind!r}; accepted: text")
        if not isinstance(part.get("text"), str):
            raise ValueError(f"{where} has a text part without a text string")
        yield part["text"]


def _join(parts: Sequence[str] | None) -> str | None:
    return None if parts is None else "".join(parts)
