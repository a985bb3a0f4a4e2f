"""The contract of early reads, recorded on a whole engine: what lies between the last write to a layer's memory and a
step that may read it before the kernel in front has ended (ops/kda_step/spec.py, ops/mla/spec.py)."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.oracle import engine_model
from helpers.ref_tiny import kimi_k3_tiny, kimi_linear_tiny, random_weights

from anabranch.engine.cache import Cache, CacheShape
from anabranch.engine.engine import Engine
from anabranch.engine.prompt_graphs import PromptGraphs
from anabranch.engine.request import Request
from anabranch.engine.runner import Runner
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.text import TextStream
from anabranch.models import kimi
from anabranch.ops.kda_step.reference import kda_step
from anabranch.ops.mla.reference import mla_step
from anabranch.ops.registry import OP_NAMES, select
from anabranch.ops.router.reference import norm_route

KL = kimi_linear_tiny(layers=4, kda_layers=(1, 2, 3), full_layers=(4,))
TINY = {"kl": KL, "kl, norms with routers": KL, "k3": kimi_k3_tiny()}
PLAIN = ("rms_norm", "residual_norm")  # launched plainly, as they add no update: all before them is complete
# which argument is the memory: the state, whose conv precedes it, or pages
WRITERS = {"kda_prefill": -1, "kda_decode": -1, "kda_step": -1, "mla_write": -1, "mla_step": 7}
EVERYTHING = -1  # slots and pools of all layers

Event = tuple[str, int]


def recorded(name: str, op: Callable, events: list[Event]) -> Callable:
    """`op`, noting its name and, where it writes a layer's memory, the pool that it writes."""

    def call(*args: Any, **options: Any) -> Any:
        pool = args[WRITERS[name]].data_ptr() if name in WRITERS else 0
        if name in ("kda_step", "mla_step"):
            events.append((f"early {name}" if options["early"] else name, pool))
            return op(*args, **options)
        out = op(*args, **options)
        adds = name == "residual_norm" and args[1] is not None
        events.append(("residual_norm of an update" if adds else name, pool))
        return out

    return call


@pytest.fixture(params=list(TINY))
def engine(request, monkeypatch) -> tuple[Engine, list[Event]]:
    events: list[Event] = []

    def select_recorded(*args: Any, **options: Any) -> Any:
        chosen = select(*args, **options)
        ops = {name: getattr(chosen.ops, name) for name in OP_NAMES if getattr(chosen.ops, name) is not None}
        ops |= {"kda_step": kda_step, "mla_step": mla_step}
        if "routers" in request.param:  # as on a GPU: it is no plain launch
            ops["norm_route"] = norm_route
        return replace(chosen, ops=replace(chosen.ops, **{name: recorded(name, ops[name], events) for name in ops}))

    def noted(method: Callable) -> Callable:
        def call(*args: Any, **options: Any) -> Any:
            events.append(("slot written", EVERYTHING))
            return method(*args, **options)

        return call

    monkeypatch.setattr(kimi, "select", select_recorded)
    for name in ("copy", "clear"):
        monkeypatch.setattr(Cache, name, noted(getattr(Cache, name)))
    monkeypatch.setattr(Runner, "_batch", noted(Runner._batch))
    model = engine_model(TINY[request.param], random_weights(TINY[request.param], 1))
    shape = CacheShape.of(model.config, model.parallel, torch.float32)
    cache = Cache(model.config, model.parallel, shape, slots=3, pages=12, snapshots=4, device="cpu")
    return Engine(Runner(model, cache), (), 512, 64, prefix_cache=True), events


def breach(events: list[Event]) -> str | None:
    """The first early step that the contract does not cover."""
    for i, (name, pool) in enumerate(events):
        if not name.startswith("early"):
            continue
        if events[i - 1][0] not in ("linear", "batched_linear", "gemm_low_rank"):
            return f"a step reads early behind {events[i - 1][0]}"
        for before, written in reversed(events[:i]):
            if before in PLAIN:
                break
            if written in (pool, EVERYTHING):
                return f"no plain launch between {before} and an early step"
    return None


def test_early_steps_stand_behind_a_projection_and_a_plain_launch(engine, request):
    """Prompts beside running answers, prefix hits and snapshots: each writes slots right before a step."""
    engine, events = engine
    prompt = [(7 * i + 2) % 30 for i in range(130)]
    for number in range(5):
        params = SamplingParams(temperature=0.0, max_tokens=6)
        engine.add(Request(id=number, prompt=[*prompt, number], params=params, text=TextStream(None)))
        for _ in range(3):
            engine.step()
    while engine.busy:
        engine.step()
    names = [name for name, _ in events]
    assert names.count("early kda_step") > 20
    assert names.count("early mla_step") > 6
    assert names.count("slot written") > 10
    assert {"kda_prefill", "mla_write"} <= set(names)
    assert (names.count("norm_route") > 20) == ("routers" in request.node.name)
    assert breach(events) is None


def test_tokens_of_one_sequence_read_no_row_early(engine):
    """A prompt's token sees rows that the same step writes."""
    (engine, events), size = engine, 16
    graphs = PromptGraphs(engine.runner.model, engine.runner.cache, [size], 500)
    events.clear()
    engine.runner.model(graphs.batch(graphs.host(size), size), engine.runner.cache.layers)
    names = {name for name, _ in events}
    assert "mla_step" in names
    assert "early mla_step" not in names


def test_the_check_sees_a_breach():
    norm, gemm, step = ("rms_norm", 0), ("linear", 0), ("early kda_step", 5)
    assert breach([("slot written", EVERYTHING), norm, gemm, step]) is None
    assert breach([norm, ("kda_step", 6), gemm, step]) is None
    assert breach([("slot written", EVERYTHING), ("add_rms_norm", 0), gemm, step]) is not None
    assert breach([norm, ("conv", 5), step]) == "a step reads early behind conv"
    assert breach([norm, ("mla_write", 5), gemm, ("early mla_step", 5)]) is not None
    assert breach([norm, ("slot written", EVERYTHING), gemm, step]) == (
        "no plain launch between slot written and an early step"
    )
