"""Compares graph replay with eager steps at every captured size, on the same prompts and the same memory."""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from anabranch.engine.llm import LLM
from anabranch.engine.request import Request
from anabranch.engine.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class GraphCheck:
    """One size: how much was compared, and where the first difference lies."""

    size: int
    replays: int
    tokens: int
    equal: bool
    verdict: str


def verify_graphs(llm: LLM, tokens: int) -> Iterator[GraphCheck]:
    """Run as many requests as each graph holds, once replayed and once eager.

    Raises:
        ValueError: there are no graphs, or the model is not in deterministic mode, where equality means nothing.
    """
    runner = llm.engine.runner
    if runner.graphs is None:
        raise ValueError("there are no graphs to verify: they need CUDA and a model without --eager")
    if not llm.model.deterministic:
        raise ValueError("graphs can only be verified in deterministic mode")
    graphs = runner.graphs
    for size in graphs.sizes:
        before = runner.graph_replays[size]
        graphed = _run(llm, size, tokens)
        replays = runner.graph_replays[size] - before
        runner.graphs = None
        try:
            eager = _run(llm, size, tokens)
        finally:
            runner.graphs = graphs
        different = [i for i, (a, b) in enumerate(zip(graphed, eager, strict=True)) if a.sampled != b.sampled]
        verdict = "bit-equal" if not different else f"request {different[0]} of {len(different)} DIFFERS"
        yield GraphCheck(size, replays, size * tokens, not different and replays > 0, verdict)


def _run(llm: LLM, count: int, tokens: int) -> list[Request]:
    rng, vocab = random.Random(count), llm.engine.runner.vocab
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    requests = [llm.request([rng.randrange(vocab) for _ in range(rng.randrange(1, 100))], params) for _ in range(count)]
    for request in requests:
        llm.engine.add(request)
    while llm.engine.busy:
        llm.engine.step()
    return requests
