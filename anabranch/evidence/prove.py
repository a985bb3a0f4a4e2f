"""Asks one or two arms for proofs beside speed: equal tokens, and scores. Rows go to a run directory and stay."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from anabranch.evidence import accuracy, exact
from anabranch.evidence.ab import Watcher, prepare
from anabranch.evidence.client import Client
from anabranch.evidence.gsm8k import STOP, Test
from anabranch.evidence.provenance import now, provenance
from anabranch.evidence.rundir import SUMMARY, ArmInfo, RunDir, RunName, Summary
from anabranch.evidence.servers import served
from anabranch.evidence.spec import ExactSpec
from anabranch.evidence.targets import Targets
from anabranch.evidence.workload import Prompt


async def prove_exact(targets: Targets, spec: ExactSpec, run_dir: RunDir, watcher: Watcher) -> Summary:
    """A twice, the control, then B: one start each. One arm alone is only compared with itself.

    Raises:
        ValueError: a server cannot be started or asked.
    """
    runs = _runs(targets, [2, 1])
    _begin(targets, run_dir)
    for done, run in enumerate(runs):
        watcher.run(run, done, len(runs))
        if not run_dir.file("exact", run.slot).exists():
            arm = next(arm for arm in targets.arms if arm.name == run.arm)
            async with served(arm, run_dir.path, run.slot) as url:
                rows = await _ask_exact(targets, spec, url, watcher)
            run_dir.write_rows("exact", run.slot, rows)
    a1, a2, *b = [run_dir.read_rows("exact", run.slot) for run in runs]
    control = [exact.compare(a1, a2) | {"runs": ["A1", "A2"]}]
    pairs = [exact.compare(a1, rows) | {"runs": ["A1", "B1"]} for rows in b]
    return _end(targets, run_dir, runs, exact=exact.verdict(control, pairs))


async def prove_accuracy(
    targets: Targets, test: Test, run_dir: RunDir, watcher: Watcher, *, starts: int, concurrency: int, max_tokens: int
) -> Summary:
    """`starts` independent servers an arm, A and B in turn.

    Raises:
        ValueError: a server cannot be started or asked.
    """
    runs = sorted(_runs(targets, [starts, starts]), key=lambda run: int(run.label[1:]))
    _begin(targets, run_dir)
    for done, run in enumerate(runs):
        watcher.run(run, done, len(runs))
        if not run_dir.file("accuracy", run.slot).exists():
            arm = next(arm for arm in targets.arms if arm.name == run.arm)
            asking = {"stop": STOP, "ignore_eos": False, "temperature": 0.0}
            async with served(arm, run_dir.path, run.slot) as url, Client(targets.client_of(url, **asking)) as client:
                rows = await accuracy.ask(
                    client, test, concurrency, max_tokens, lambda done, total: watcher.step("questions", done, total)
                )
            run_dir.write_rows("accuracy", run.slot, rows)
    found = {
        arm.name: [run_dir.read_rows("accuracy", run.slot) for run in runs if run.arm == arm.name]
        for arm in targets.arms
    }
    return _end(targets, run_dir, runs, accuracy=accuracy.summarise(test, found))


async def _ask_exact(targets: Targets, spec: ExactSpec, url: str, watcher: Watcher) -> list[dict[str, Any]]:
    async with Client(targets.client_of(url, logprobs=True, temperature=0.0, ignore_eos=True)) as client:
        await client.find_model()
        size = targets.vocab_size or await client.vocab_size()
        if size is None:
            raise ValueError(f"{url}: fixed inputs are random ids: give vocab-size, as the server does not tell it")
        inputs = exact.cases(spec, size)
        await client.probe(Prompt(ids=inputs[0].prompt.ids, max_tokens=1))
        await client.flush_cache()
        return await exact.ask(client, inputs, lambda done, total: watcher.step("fixed inputs", done, total))


def _runs(targets: Targets, starts: Sequence[int]) -> list[RunName]:
    return [
        RunName(label=f"{letter}{i}", arm=arm.name, slot=f"{arm.name}-{i}", phase="proof")
        for letter, arm, count in zip("AB", targets.arms, starts, strict=False)
        for i in range(1, count + 1)
    ]


def _begin(targets: Targets, run_dir: RunDir) -> None:
    if not run_dir.read_provenance():
        run_dir.write_provenance(provenance(arm.repo for arm in targets.arms if arm.repo))
    if targets.spec is not None:
        prepare(targets.spec, run_dir.path)


def _end(targets: Targets, run_dir: RunDir, runs: Sequence[RunName], **found: Any) -> Summary:
    """The summary with what was found, beside what a comparison left there before."""
    if (run_dir.path / SUMMARY).exists():
        summary = replace(run_dir.read_summary(), **found)
    else:
        summary = Summary(
            title=targets.spec.title if targets.spec else " and ".join(str(arm.url) for arm in targets.arms),
            created=now(),
            provenance=run_dir.read_provenance(),
            arms=[ArmInfo(name=arm.name, command=arm.command, url=arm.url, env=dict(arm.env)) for arm in targets.arms],
            schedule=[run.label for run in runs],
            runs=[],
            **found,
        )
    run_dir.write_summary(summary)
    return summary
