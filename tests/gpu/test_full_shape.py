"""The Kimi-Linear-48B shape with dummy weights, deterministic: one prompt alone, in a crowd, cut, preempted."""

import random
from pathlib import Path

import pytest
import torch

from anabranch.engine.llm import LLM
from anabranch.engine.request import Request
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.verify import verify_graphs

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_properties(0).total_memory < 120e9,
    reason="98 GB of weights need a GPU of 120 GB or more",
)


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(
        Path(__file__).parents[1] / "data/configs/kimi_linear_48b_config.json",
        load_format="dummy",
        deterministic=True,
        max_seqs=33,
        max_len=1024,
        prefill_chunk=2048,
        graph_sizes=[1, 8, 33],
    )


def ask(llm: LLM, seed: int, length: int, count: int = 24) -> Request:
    rng = random.Random(seed)
    prompt = [rng.randrange(llm.model.config.vocab_size) for _ in range(length)]
    return llm.request(prompt, SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=2))


def run(llm: LLM, *requests: Request) -> list:
    for request in requests:
        llm.engine.add(request)
    while llm.engine.busy:
        llm.engine.step()
    return requests[0].sampled


def flush(llm: LLM) -> None:
    llm.engine.scheduler.prefix.flush()


def test_bits_do_not_know_the_schedule(llm):
    alone = run(llm, ask(llm, 7, 300))
    assert len({s.token for s in alone}) > 12, "degenerate answers prove nothing"
    flush(llm)
    rng = random.Random(1)
    crowd = [ask(llm, 100 + i, rng.randrange(1, 400), rng.randrange(4, 40)) for i in range(32)]
    assert run(llm, ask(llm, 7, 300), *crowd) == alone
    assert run(llm, warm := ask(llm, 7, 300)) == alone
    assert warm.cached_tokens == 256
    for chunk in (64, 100):
        flush(llm)
        llm.engine.scheduler.prefill_chunk = chunk
        assert run(llm, ask(llm, 7, 300)) == alone, chunk
    llm.engine.ahead = False  # nobody is preempted while a sample of theirs is on its way
    for steps in (1, 9):
        flush(llm)
        request = ask(llm, 7, 300)
        llm.engine.add(request)
        for _ in range(steps):
            llm.engine.step()
        llm.engine.scheduler._preempt(request)
        run(llm, ask(llm, 9, 5))
        assert (request.preemptions, request.sampled) == (1, alone)
    llm.engine.ahead, llm.engine.scheduler.prefill_chunk = True, 2048


def test_graphs_equal_eager_steps(llm):
    results = list(verify_graphs(llm, 8))
    assert [r.size for r in results] == [1, 8, 33]
    assert all(r.equal for r in results), results
