"""`anabranch bench serve`: load on any OpenAI-compatible server; flags and keys are those of `vllm bench serve`."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from anabranch.evidence.client import ClientSpec, Manners
    from anabranch.evidence.load import Load, LoadSpec
    from anabranch.evidence.workload import WorkloadSpec

_LATENCIES = {"ttft": "time to first token", "tpot": "time per output token", "itl": "between tokens", "e2el": "whole"}


def serve(
    base_url: Annotated[str, typer.Option(help="http://HOST:PORT of the server.")] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Default: the first of /v1/models.")] = None,
    backend: Annotated[str, typer.Option(help="openai (completions) or openai-chat.")] = "openai",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Sent as a Bearer token.")] = None,
    dataset_name: Annotated[str, typer.Option(help="random, custom (lines) or sharegpt.")] = "random",
    dataset_path: Annotated[Path | None, typer.Option(help="File of a custom or sharegpt dataset.")] = None,
    num_prompts: Annotated[int, typer.Option(help="Requests.")] = 100,
    random_input_len: Annotated[int, typer.Option(help="Token ids of a random prompt.")] = 1024,
    random_output_len: Annotated[int, typer.Option(help="Tokens of an answer to a random prompt.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="0: exact lengths; r: up to r shorter or longer.")] = 0.0,
    random_prefix_len: Annotated[int, typer.Option(help="Ids that all random prompts begin with.")] = 0,
    custom_output_len: Annotated[int, typer.Option(help="Tokens of an answer where the file does not say.")] = 256,
    vocab_size: Annotated[int | None, typer.Option(help="For random ids, where the server does not tell it.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="tokenizer.json, to send random ids as text.")] = None,
    request_rate: Annotated[float, typer.Option(help="Requests a second (open loop); inf: all at once.")] = float(
        "inf"
    ),
    burstiness: Annotated[float, typer.Option(help="1: Poisson; larger is more even.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(help="Open requests at most (closed loop).")] = None,
    num_warmups: Annotated[int, typer.Option(help="Requests before the clock starts, other prompts.")] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts and arrival times.")] = 0,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers of exactly the length asked for.")] = True,
    extra_body: Annotated[str | None, typer.Option(help="JSON object merged into every request.")] = None,
    goodput: Annotated[list[str] | None, typer.Option(help="ttft:MS, tpot:MS or e2el:MS. Repeatable.")] = None,
    percentile_metrics: Annotated[str, typer.Option(help="Latencies in the table.")] = "ttft,tpot,itl,e2el",
    metric_percentiles: Annotated[str, typer.Option(help="Percentiles.")] = "99",
    retries: Annotated[int, typer.Option(help="After a refused connection, 429 or 503.")] = 0,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte.")] = 600.0,
    label: Annotated[str | None, typer.Option(help="Kept in the result.")] = None,
    save_result: Annotated[bool, typer.Option("--save-result", help="Write the result to a file.")] = False,
    result_filename: Annotated[Path | None, typer.Option(help="That file; implies --save-result.")] = None,
    rows: Annotated[Path | None, typer.Option(help="Also write one JSON line a request.")] = None,
) -> None:
    """Load a server and print its figures; the last line is one JSON document."""
    from anabranch.evidence.client import ClientSpec
    from anabranch.evidence.load import LoadSpec
    from anabranch.evidence.metrics import parse_goodput
    from anabranch.evidence.workload import WorkloadSpec

    spec = ClientSpec(
        base_url=base_url,
        model=model,
        backend=backend,
        api_key=api_key,
        temperature=temperature,
        ignore_eos=ignore_eos,
        timeout_s=timeout,
        retries=retries,
        extra_body=_json_object("extra-body", extra_body),
    )
    workload = WorkloadSpec(
        dataset_name=dataset_name,
        dataset_path=dataset_path,
        num_prompts=num_prompts,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_range_ratio=random_range_ratio,
        random_prefix_len=random_prefix_len,
        custom_output_len=custom_output_len,
        vocab_size=vocab_size,
        seed=seed,
    )
    load = LoadSpec(request_rate=request_rate, max_concurrency=max_concurrency, burstiness=burstiness, seed=seed)
    shown, percentiles = _latencies(percentile_metrics), _percentiles(metric_percentiles)
    limits = parse_goodput(goodput or [])
    done, manners, name = asyncio.run(_load(spec, workload, load, num_warmups, tokenizer))
    document = _document(spec, name, load, label, num_prompts, manners, done, percentiles, limits)
    _report(document, done, shown, percentiles)
    if rows is not None:
        _write(rows, "".join(json.dumps(row.to_json()) + "\n" for row in done.rows))
    if save_result or result_filename is not None:
        _write(result_filename or Path(f"serve-{name.rpartition('/')[2]}.json"), json.dumps(document, indent=1))
    typer.echo(json.dumps(document))
    raise typer.Exit(0 if document["completed"] else 1)


async def _load(
    spec: "ClientSpec", workload: "WorkloadSpec", load: "LoadSpec", warmups: int, tokenizer: Path | None
) -> tuple["Load", "Manners", str]:
    from dataclasses import replace

    from anabranch.cli.watch import Watch
    from anabranch.evidence.client import Client
    from anabranch.evidence.load import LoadSpec, run_load
    from anabranch.evidence.workload import as_text

    async with Client(spec) as client:
        name = await client.find_model()
        if workload.dataset_name == "random" and workload.vocab_size is None:
            size = await client.vocab_size() if tokenizer is None else _tokenizer(tokenizer).get_vocab_size()
            workload = replace(workload, vocab_size=size)
        prompts = workload.prompts()
        warm = replace(workload, seed=workload.seed + 1_000_003, num_prompts=max(1, warmups)).prompts()
        if tokenizer is not None:
            prompts, warm = (as_text(each, _tokenizer(tokenizer).decode) for each in (prompts, warm))
        manners = await client.probe(warm[0])
        with Watch() as watch:
            if warmups:
                await run_load(client, warm, LoadSpec(max_concurrency=load.max_concurrency))
            done = await run_load(client, prompts, load, lambda *far: watch.step("requests", *far))
        return done, manners, name


def _document(
    spec: "ClientSpec",
    name: str,
    load: "LoadSpec",
    label: str | None,
    num_prompts: int,
    manners: "Manners",
    done: "Load",
    percentiles: Sequence[float],
    limits: dict[str, float],
) -> dict[str, Any]:
    from anabranch.evidence.metrics import measure, problems
    from anabranch.evidence.provenance import provenance

    warnings = problems(done.rows)
    if spec.ignore_eos and not manners.ignore_eos:
        warnings.append("the server refuses ignore_eos: answers may be shorter than asked for")
    rate = load.request_rate
    return {
        "date": provenance()["time"],
        "backend": spec.backend,
        "endpoint_type": spec.backend,
        "label": label,
        "model_id": name,
        "num_prompts": num_prompts,
        "request_rate": rate if rate != float("inf") else "inf",
        "burstiness": load.burstiness,
        "max_concurrency": load.max_concurrency,
        **measure([done.rows], percentiles, limits),
        "token_basis": manners.basis,
        "client_lag_ms": done.client_lag_s * 1e3,
        "warnings": warnings,
        "provenance": provenance(),
    }


def _report(document: dict[str, Any], done: "Load", shown: Sequence[str], percentiles: Sequence[float]) -> None:
    counted = {"ids": "token ids", "usage": "the running usage", "total": "the final usage"}[document["token_basis"]]
    typer.echo(
        f"{document['completed']} of {len(done.rows)} requests in {document['duration']:.2f} s; tokens counted by "
        f"{counted}\n{document['request_throughput']:.2f} req/s, {document['output_throughput']:.1f} tok/s out, "
        f"{document['total_token_throughput']:.1f} tok/s in and out"
    )
    for name in shown:
        statistics = ["mean", "median", *(f"p{p:g}" for p in percentiles)]
        values = [(statistic, document[f"{statistic}_{name}_ms"]) for statistic in statistics]
        told = ", ".join(f"{statistic} {value:.2f}" for statistic, value in values if value is not None)
        typer.echo(f"{name:5} {_LATENCIES[name]:22} {f'{told} ms' if told else 'not reported'}")
    for line in document["warnings"]:
        typer.echo(f"warning: {line}", err=True)


def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.is_file():
        raise ValueError(f"tokenizer={path}: no such tokenizer.json")
    return Tokenizer.from_file(str(file))


def _json_object(name: str, text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ValueError(f"{name}={text!r}: need a JSON object")
    return value


def _latencies(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in _LATENCIES]:
        raise ValueError(f"percentile-metrics has {unknown[0]!r}: accepted are {', '.join(_LATENCIES)}")
    return names


def _percentiles(text: str) -> list[float]:
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = [-1.0]
    if not all(0 < value < 100 for value in values):
        raise ValueError(f"metric-percentiles={text!r}: need numbers between 0 and 100 with commas between them")
    return values


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path}: cannot be written ({error.strerror})") from None
