"""Runs a comparison into its directory: one server start, one load and one set of counters for each run."""

import asyncio
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from anabranch.evidence import exact
from anabranch.evidence.client import Client, Manners
from anabranch.evidence.compare import summarise
from anabranch.evidence.load import LoadSpec, run_load
from anabranch.evidence.provenance import devices, provenance
from anabranch.evidence.rundir import RunDir, RunName, Summary
from anabranch.evidence.schedule import ask_exact, plan_runs, prompt_seed
from anabranch.evidence.scrape import change, holds, scrape
from anabranch.evidence.servers import environment, fill, served
from anabranch.evidence.spec import ArmSpec, Spec
from anabranch.evidence.workload import Prompt, WorkloadSpec

# so that warm-up prompts are never those of a formal run
_WARM_SEED = 1_000_003


class Watcher(Protocol):
    """Told how far the work is."""

    def run(self, run: RunName, done: int, total: int) -> None:
        """The run that begins now, and how many of all are behind it."""
        ...

    def step(self, what: str, done: int, total: int) -> None:
        """Requests of the present run that are done."""
        ...


async def run_ab(spec: Spec, run_dir: RunDir, watcher: Watcher) -> Summary:
    """All runs that are not finished yet, then the summary; it is also written when the work is interrupted.

    Raises:
        ValueError: a server cannot be started or asked.
    """
    check_expectations(spec)
    planned = plan_runs(spec)
    try:
        if not run_dir.read_provenance():
            run_dir.write_provenance(provenance(arm.repo for arm in spec.arms if arm.repo))
        prepare(spec, run_dir.path)
        for done, run in enumerate(planned):
            watcher.run(run, done, len(planned))
            if not run_dir.finished(run.slot):
                await _measure(spec, run, run_dir, watcher.step)
    finally:
        summary = summarise(spec, run_dir)
        run_dir.write_summary(summary)
    return summary


def check_expectations(spec: Spec) -> None:
    """ValueError for an expectation that could never be judged, before anything is started."""
    for arm in spec.arms:
        for rule in arm.expect.values():
            if rule.strip() != "any":
                holds(rule, 0.0)


def prepare(spec: Spec, path: Path) -> None:
    """Run the spec's preparing commands, once for a directory.

    Raises:
        ValueError: one of them fails.
    """
    marker = path / "prepared"
    if marker.exists():
        return
    for command in spec.prepare:
        words = fill(command, run_dir=path)
        try:
            done = subprocess.run(words, env=environment(), capture_output=True, text=True, stdin=subprocess.DEVNULL)
        except OSError as error:
            raise ValueError(f"prepare {command!r}: {error.strerror}") from None
        if done.returncode:
            said = " ".join((done.stderr or done.stdout).strip().splitlines()[-2:])
            raise ValueError(f"prepare {command!r}: status {done.returncode}: {said}")
    marker.touch()


async def _measure(spec: Spec, run: RunName, run_dir: RunDir, step: Callable[[str, int, int], None]) -> None:
    arm = spec.a if run.arm == spec.a.name else spec.b
    async with served(arm, run_dir.path, run.slot) as url, Client(spec.client_of(url)) as client:
        await client.find_model()
        workload = await _workload(spec, client)
        manners, notes = await _warm_up(spec, workload, client, arm, step)
        await asyncio.sleep(spec.schedule.settle_s)
        prompts = replace(workload, seed=prompt_seed(spec, run)).prompts()
        before = await scrape(client)
        load = await run_load(client, prompts, spec.load, lambda done, total: step("requests", done, total))
        counted, clocks = change(before, await scrape(client)), devices()
        if ask_exact(spec, run):
            await _ask_exact(spec, run, run_dir, client, workload, step)
    run_dir.write_rows("requests", run.slot, (row.to_json() for row in load.rows))
    kept = {"run": run.label, "arm": run.arm, "counters": counted, "client_lag_s": load.client_lag_s}
    kept |= {
        "machine_load_1m": os.getloadavg()[0],
        "token_basis": manners.basis,
        "devices_after": clocks,
        "notes": notes,
    }
    run_dir.finish(run.slot, kept)


async def _workload(spec: Spec, client: Client) -> WorkloadSpec:
    needs = spec.workload.dataset_name == "random" or spec.exact is not None
    if not needs or spec.workload.vocab_size is not None:
        return spec.workload
    return replace(spec.workload, vocab_size=await client.vocab_size())


async def _warm_up(
    spec: Spec, workload: WorkloadSpec, client: Client, arm: ArmSpec, step: Callable[[str, int, int], None]
) -> tuple[Manners, list[str]]:
    count = max(1, spec.schedule.warmups)
    prompts = replace(workload, seed=workload.seed + _WARM_SEED, num_prompts=count).prompts()
    manners = await client.probe(prompts[0])
    notes = [] if manners.ignore_eos or not client.spec.ignore_eos else ["the server refuses ignore_eos"]
    if spec.schedule.warmups:
        warm = LoadSpec(max_concurrency=spec.load.max_concurrency)
        await run_load(client, prompts, warm, lambda done, total: step("warm-up", done, total))
    if arm.url is not None:  # a server that lives on must not remember the last run
        await client.flush_cache()
    return manners, notes


async def _ask_exact(
    spec: Spec,
    run: RunName,
    run_dir: RunDir,
    client: Client,
    workload: WorkloadSpec,
    step: Callable[[str, int, int], None],
) -> None:
    assert spec.exact is not None
    if workload.vocab_size is None:
        raise ValueError("exact inputs are random ids: give load.vocab_size, as the server does not tell it")
    inputs = exact.cases(spec.exact, workload.vocab_size)
    async with Client(replace(client.spec, logprobs=True, model=client.model)) as asking:
        await asking.probe(Prompt(ids=inputs[0].prompt.ids, max_tokens=1))
        rows = await exact.ask(asking, inputs, lambda done, total: step("fixed inputs", done, total))
    run_dir.write_rows("exact", run.slot, rows)
