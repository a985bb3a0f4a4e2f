"""`anabranch generate`: complete a prompt and stream the text."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from anabranch.cli import options

if TYPE_CHECKING:
    from anabranch.engine.llm import LLM
    from anabranch.engine.sampling import SamplingParams


def generate(
    model: options.Model,
    prompt: Annotated[str | None, typer.Argument(help="The prompt; '-' or nothing reads standard input.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Read the prompt from a UTF-8 file.")] = None,
    max_tokens: options.MaxTokens = 128,
    temperature: options.Temperature = 1.0,
    top_p: options.TopP = 1.0,
    top_k: options.TopK = 0,
    seed: options.Seed = None,
    stop: Annotated[list[str] | None, typer.Option(help="End at this string. Repeatable.")] = None,
    logprobs: Annotated[int | None, typer.Option(help="With --json: alternatives reported for each token.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end token.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of streamed text.")] = False,
    fusion: options.Fusion = None,
    op: options.Op = None,
    deterministic: options.Deterministic = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.LoadFormat = "auto",
    mla_norm_eps: options.MlaNormEps = None,
    max_len: options.MaxLen = 4096,
    lora: options.Lora = None,
    tp: options.Tp = 1,
    dp_attention: options.DpAttention = 1,
    ep: options.Ep = 1,
    pp: options.Pp = 1,
) -> None:
    """Complete a prompt; text streams to standard output."""
    from anabranch import LLM, FusionConfig, SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        stop=tuple(stop or ()),
        logprobs=logprobs,
        ignore_eos=ignore_eos,
    )
    text = read_prompt(prompt, file)
    with (
        options.one_line_failures(),
        LLM(
            model,
            dtype=dtype,
            device=device,
            fusion=FusionConfig.parse(fusion or []),
            ops=options.parse_ops(op or []),
            deterministic=deterministic,
            load_format=load_format,
            mla_norm_eps=mla_norm_eps,
            max_len=max_len,
            max_seqs=1,
            lora=lora,
            progress=sys.stderr.isatty(),
            tp=tp,
            dp_attention=dp_attention,
            ep=ep,
            pp=pp,
        ) as llm,
    ):
        _answer(llm, text, params, as_json)


def _answer(llm: "LLM", text: str, params: "SamplingParams", as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(as_document(llm.generate([text], params)[0]), ensure_ascii=False))
        return
    for piece in llm.stream(text, params):
        if isinstance(piece, str):
            typer.echo(piece, nl=False)
            sys.stdout.flush()
        elif piece.outputs[0].error:
            typer.echo(f"\nerror: {piece.outputs[0].error}", err=True)
            raise typer.Exit(1)
    typer.echo()


def read_prompt(prompt: str | None, file: Path | None) -> str:
    """The prompt from exactly one of argument, file and standard input."""
    if prompt not in (None, "-") and file is not None:
        raise ValueError("the prompt is given twice: as an argument and with --file")
    source = "standard input" if file is None else str(file)
    if prompt not in (None, "-"):
        return str(prompt)
    try:
        raw = sys.stdin.buffer.read() if file is None else file.read_bytes()
    except OSError as error:
        raise ValueError(f"{source}: {error.strerror}") from None
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{source}: not UTF-8 at byte {error.start}") from None


def as_document(output) -> dict:
    """A RequestOutput as one JSON object."""
    answer = output.outputs[0]
    after_first = len(answer.token_ids) - 1
    decode = output.seconds - output.time_to_first_token
    return {
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": answer.text,
        "token_ids": answer.token_ids,
        "logprobs": answer.logprobs,
        "top_logprobs": answer.top_logprobs,
        "finish_reason": answer.finish_reason,
        "error": answer.error,
        "timings": {
            "time_to_first_token_s": output.time_to_first_token,
            "total_s": output.seconds,
            "decode_tokens_per_s": after_first / decode if after_first and decode else None,
        },
    }
