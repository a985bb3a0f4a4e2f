"""`anabranch chat`: a conversation in the terminal."""

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM
    from anabranch.engine.sampling import SamplingParams
    from anabranch.models.answer import Answer


def chat(
    model: options.Model,
    message: Annotated[str | None, typer.Option("--message", "-m", help="Ask once, print the answer, leave.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    thinking: Annotated[bool, typer.Option(help="Kimi-K3: open the thinking channel first.")] = True,
    max_tokens: options.MaxTokens = 256,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    fusion: options.Fusion = None,
    deterministic: options.Deterministic = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    max_len: options.MaxLen = 4096,
    lora: options.Lora = None,
) -> None:
    """Talk to the model; an empty line or end of input leaves."""
    from anabranch import LLM, FusionConfig, SamplingParams

    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)
    llm = LLM(
        model,
        dtype=dtype,
        device=device,
        fusion=FusionConfig.parse(fusion or []),
        deterministic=deterministic,
        max_len=max_len,
        max_seqs=1,
        lora=lora,
        progress=sys.stderr.isatty(),
    )
    messages = [{"role": "system", "content": system}] if system else []
    while question := message or _ask():
        messages.append({"role": "user", "content": question})
        messages.append(_answer(llm, messages, thinking, params).message())
        if message:
            return


def _answer(llm: "LLM", messages: list[dict[str, Any]], thinking: bool, params: "SamplingParams") -> "Answer":
    """Stream one turn: reasoning dimmed, then the content."""
    from anabranch.models.answer import Answer, AnswerParser, ContentDelta, ReasoningDelta

    architecture = llm.model.config.architecture
    options = {"thinking": thinking} if architecture == "kimi_k3" else {}
    parser, seen = AnswerParser(architecture, thinking=thinking, tools=False), []

    def show(deltas: list) -> None:
        seen.extend(deltas)
        for delta in deltas:
            if isinstance(delta, ReasoningDelta | ContentDelta):
                typer.secho(delta.text, dim=isinstance(delta, ReasoningDelta), nl=False)
        sys.stdout.flush()

    for piece in llm.stream(llm.chat_prompt(messages, **options), params):
        if isinstance(piece, str):
            show(parser.push(piece))
        elif piece.outputs[0].error:
            typer.echo(f"\nerror: {piece.outputs[0].error}", err=True)
            raise typer.Exit(1)
    show(parser.finish())
    typer.echo()
    return Answer.of(seen)


def _ask() -> str:
    prompt = "> " if sys.stdin.isatty() else ""
    try:
        return input(prompt)
    except EOFError:
        return ""
