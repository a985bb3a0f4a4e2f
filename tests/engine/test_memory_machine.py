"""Slots, pages and snapshots as a state machine, and ten thousand random steps: no leak, no cross-talk."""

import random

import pytest
from helpers.memory_machine import CONFIG, PREFIXES, Memory
from helpers.toy import POISON, VOCAB, answer, check_memory, toy_engine, toy_request
from hypothesis import settings

TestMemory = Memory.TestCase
TestMemory.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


@pytest.mark.parametrize(("snapshots", "ahead", "saves"), [(0, False, False), (5, True, True)])
def test_ten_thousand_random_steps(snapshots, ahead, saves):
    rng = random.Random(snapshots)
    engine = toy_engine(CONFIG, slots=4, pages=11, snapshots=snapshots, chunk=90, ahead=ahead, saves=saves)
    requests, alive, steps, number = [], [], 0, 0
    while steps < 10_000:
        if rng.random() < 0.2 and len(engine.scheduler.waiting) < 6:
            prompt = rng.choice(PREFIXES)[: rng.randrange(193)] + [
                rng.randrange(VOCAB - 1) for _ in range(rng.randrange(1, 60))
            ]
            if rng.random() < 0.05:
                prompt.append(POISON)
            alive.append(toy_request(number, prompt, rng.randrange(1, 150)))
            engine.add(alive[-1])
            number += 1
        if rng.random() < 0.02 and alive:
            engine.abort(rng.choice(alive))
        if engine.busy:
            engine.step()
        steps += 1
        if steps % 50 == 0:
            check_memory(engine)
        ended = [r for r in alive if r.finish_reason]
        for r in ended:
            assert r.output == answer(r.prompt, len(r.sampled))
        requests += ended
        alive = [r for r in alive if not r.finish_reason]
    reasons = {reason: sum(r.finish_reason == reason for r in requests) for reason in ("length", "abort", "error")}
    assert min(reasons.values()) > 3, reasons
    assert engine.scheduler.preemptions > 20
    if snapshots:
        assert engine.scheduler.prefix_hits > 1000
    left = engine.runner.model.left
    assert left > 100 if saves else not left, left
    assert engine.nonfinite == reasons["error"]
