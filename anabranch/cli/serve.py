"""`anabranch serve`: an OpenAI-compatible server."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from anabranch.cli import options

if TYPE_CHECKING:
    import socket

    from anabranch.server.settings import ServerSettings


def serve(
    model: options.Model,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 is every network.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="ANABRANCH_API_KEY", help="Asked for as a Bearer token.", show_envvar=True)
    ] = None,
    served_model_name: Annotated[str | None, typer.Option(help="Default: the directory's name.")] = None,
    parser: Annotated[str, typer.Option(help="kimi: reasoning, content, tool calls; none: raw text.")] = "kimi",
    max_queue: Annotated[int, typer.Option(help="Answers that may wait beyond --max-seqs.")] = 256,
    max_body_mb: Annotated[int, typer.Option(help="Longest request body, in 2^20 bytes.")] = 32,
    body_timeout: Annotated[float, typer.Option(help="Seconds that a request body may take to arrive.")] = 30.0,
    request_timeout: Annotated[float | None, typer.Option(help="Seconds that an answer may take.")] = None,
    drain: Annotated[float, typer.Option(help="Seconds that answers get to end at SIGTERM.")] = 30.0,
    profile_dir: Annotated[Path | None, typer.Option(help="Allows /start_profile, and takes its traces.")] = None,
    max_seqs: Annotated[int, typer.Option(help="Answers computed at the same time.")] = 16,
    max_len: options.MaxLen = 4096,
    prefill_chunk: Annotated[int, typer.Option(help="Prompt tokens computed in one step.")] = 2048,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse what earlier prompts computed.")] = True,
    memory_fraction: Annotated[float, typer.Option(help="Share of the device for model and cache.")] = 0.9,
    eager: Annotated[bool, typer.Option("--eager", help="No CUDA graphs.")] = False,
    graph_sizes: Annotated[str | None, typer.Option(help="Decode sizes that get a graph, e.g. 1,8,32.")] = None,
    state_dtype: Annotated[str, typer.Option(help="Recurrent state: float32 or bfloat16.")] = "float32",
    fusion: options.Fusion = None,
    op: options.Op = None,
    deterministic: options.Deterministic = False,
    dtype: options.Dtype = "auto",
    device: options.Device = "auto",
    load_format: options.LoadFormat = "auto",
    mla_norm_eps: options.MlaNormEps = None,
    lora: options.Lora = None,
    tp: options.Tp = 1,
    dp_attention: options.DpAttention = 1,
    ep: options.Ep = 1,
    pp: options.Pp = 1,
    rank_timeout: options.RankTimeout = 120.0,
    expert_load: options.ExpertLoad = False,
) -> None:
    """Serve the model over HTTP with the OpenAI API; under torchrun the first rank does."""
    from anabranch import FusionConfig
    from anabranch.server.process import listen
    from anabranch.server.settings import ServerSettings

    settings = ServerSettings(
        host=host,
        port=port,
        api_key=api_key,
        served_model_name=served_model_name,
        parser=parser,
        max_body_bytes=max_body_mb << 20,
        max_queue=max_queue,
        body_timeout_s=body_timeout,
        request_timeout_s=request_timeout,
        drain_s=drain,
        profile_dir=profile_dir,
    )
    llm: dict[str, Any] = {"dtype": dtype, "device": device} | {
        "fusion": FusionConfig.parse(fusion or []),
        "ops": options.parse_ops(op or []),
        "deterministic": deterministic,
        "load_format": load_format,
        "memory_fraction": memory_fraction,
        "eager": eager,
        "graph_sizes": options.parse_sizes(graph_sizes),
        "state_dtype": state_dtype,
        "mla_norm_eps": mla_norm_eps,
        "lora": lora,
        "progress": sys.stderr.isatty(),
    }
    llm |= {"tp": tp, "dp_attention": dp_attention, "ep": ep, "pp": pp, "rank_timeout": rank_timeout}
    llm["expert_load"] = expert_load
    llm |= {"max_seqs": max_seqs, "max_len": max_len, "prefill_chunk": prefill_chunk, "prefix_cache": prefix_cache}
    with options.one_line_failures():
        if tp * pp > 1 and int(os.environ.get("RANK", "0")):
            from anabranch import LLM

            LLM(model, **llm)  # computes what the first rank says until the job ends, and exits
        # before the weights are read: a port in use is told at once
        _serve(model, llm, settings, listen(settings))


def _serve(model: Path, llm: dict[str, Any], settings: "ServerSettings", sock: "socket.socket") -> None:
    from anabranch.engine.process import EngineProcess
    from anabranch.engine.service import EngineService
    from anabranch.models.tokenizer import Tokenizer, has_tokenizer
    from anabranch.server.app import create_app
    from anabranch.server.process import run

    with EngineProcess(model, llm) as engine:
        # while the engine loads
        tokenizer = None if llm["load_format"] == "dummy" and not has_tokenizer(model) else Tokenizer.load(model)
        engine.load()
        typer.echo(engine.facts.memory, err=True)
        run(create_app(EngineService(engine), tokenizer, settings), sock)
