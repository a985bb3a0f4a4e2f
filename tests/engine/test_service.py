"""The service's protocol over a real socket: what arrives, what is refused, and what a failure tells everyone."""

import asyncio
import json
import pickle
import socket
import threading
from collections import Counter

import pytest
from helpers.adapters import random_pairs, write_adapter
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from anabranch.engine import wire
from anabranch.engine.facts import facts_of
from anabranch.engine.llm import LLM
from anabranch.engine.messages import EngineFailed, QueueFull, Update
from anabranch.engine.process import EngineThread
from anabranch.engine.sampling import SamplingParams
from anabranch.engine.service import EngineService, Ticket
from anabranch.models.tiny import init_checkpoint


@pytest.fixture(scope="module")
def llm(tmp_path_factory) -> LLM:
    path = tmp_path_factory.mktemp("service") / "tiny-k3"
    init_checkpoint("k3", path, seed=0)
    return LLM(path, max_seqs=2, max_len=256, prefill_chunk=64)


def served(llm, use, seconds: float = 30.0):
    """What `use(service)` returns, with the service drained at the end."""

    async def go():
        service = EngineService(EngineThread(llm))
        await service.start()
        try:
            return await asyncio.wait_for(use(service), seconds)
        finally:
            await service.drain(0.0)

    return asyncio.run(go())


async def all_of(ticket) -> list[Update]:
    return [update async for update in ticket]


def params(count: int, **more) -> SamplingParams:
    return SamplingParams(max_tokens=count, **{"temperature": 0.0, "ignore_eos": True, **more})


def test_answers_are_those_of_the_engine(llm):
    prompts = [[72, 105], [1, 2, 3] * 30, [7]]
    wanted = [o.outputs[0] for o in llm.generate(prompts, params(12, logprobs=2, prompt_logprobs=1))]

    async def use(service):
        tickets = [service.submit(p, params(12, logprobs=2, prompt_logprobs=1)) for p in prompts]
        return await asyncio.gather(*map(all_of, tickets))

    for updates, output, prompt in zip(served(llm, use), wanted, prompts, strict=True):
        assert [t for u in updates for t in u.token_ids] == output.token_ids
        assert "".join(u.text for u in updates) == output.text
        assert [x for u in updates for x in u.logprobs] == pytest.approx(output.logprobs, abs=1e-4)
        assert [sorted(top) for u in updates for top in u.top_logprobs] == [sorted(t) for t in output.top_logprobs]
        assert [u.finish_reason for u in updates] == [None] * (len(updates) - 1) + ["length"]
        assert len(updates) == 12, "every step must be told"
        assert len(updates[0].prompt_logprobs) == len(prompt)
        assert all(u.prompt_logprobs is None and u.queue_s is None for u in updates[1:])
        assert 0 < updates[0].queue_s < 30
        assert {u.prompt_tokens for u in updates} == {len(prompt)}


def test_the_third_of_two_slots_waits_longest(llm):
    async def use(service):
        tickets = [service.submit([i + 1], params(20)) for i in range(3)]
        return [updates[0].queue_s for updates in await asyncio.gather(*map(all_of, tickets))]

    first, second, third = served(llm, use)
    assert third > max(first, second) > 0


@pytest.mark.parametrize(
    ("prompt", "options", "words"),
    [
        ([], {}, "no tokens"),
        ([300], {}, "token id 300 is outside the vocabulary 0..271"),
        ([-1], {}, "token id -1"),
        ([1], {"logit_bias": {999: 1.0}}, "token id 999"),
        ([1], {"stop_token_ids": (272,)}, "token id 272"),
        ([1] * 250, {}, "exceeds the context of 256"),
    ],
)
def test_what_can_never_run_is_refused_before_the_engine_hears_of_it(llm, prompt, options, words):
    async def use(service):
        with pytest.raises(ValueError, match=words):
            service.submit(prompt, params(8, **options))
        assert not service._tickets
        # and if it does hear of it, it says so and lives on
        ticket = service._tickets[7] = Ticket(service, 7)
        service._say("submit", 7, prompt, params(8, **options), True, 0.0)
        [update] = await all_of(ticket)
        assert (update.finish_reason, words in update.error) == ("error", True)
        return await all_of(service.submit([1], params(2)))

    assert served(llm, use)[-1].finish_reason == "length"


def test_an_abort_frees_its_slot_and_is_told(llm):
    async def use(service):
        ticket = service.submit([1], params(200))
        await anext(ticket)
        ticket.abort()
        last = (await all_of(ticket))[-1]
        ticket.abort()
        service.abort(12345)
        return last, dict(service.stats())

    last, stats = served(llm, use)
    assert last.finish_reason == "abort"
    assert (stats["running"], stats["slots_used"]) == (0, 0)


def test_draining_refuses_and_aborts_what_is_late(llm):
    async def use(service):
        ticket = service.submit([1], params(250))
        await anext(ticket)
        await service.drain(0.1)
        with pytest.raises(QueueFull, match="shutting down"):
            service.submit([1], params(1))
        with pytest.raises(EngineFailed, match="shutting down"):
            await service.flush_cache()
        assert service.failure is None
        return (await all_of(ticket))[-1].finish_reason

    assert served(llm, use) == "abort"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_failed_step_is_told_to_everyone(llm, monkeypatch):
    def fail():
        raise MemoryError("no pages")

    async def use(service):
        tickets = [service.submit([i + 1], params(200)) for i in range(3)]
        await anext(tickets[0])
        monkeypatch.setattr(llm.engine, "step", fail)
        for ticket in tickets:
            last = (await all_of(ticket))[-1]
            assert (last.finish_reason, last.error) == ("error", "the engine failed: MemoryError: no pages")
        await service.ended()
        with pytest.raises(QueueFull, match="no pages"):
            service.submit([1], params(1))
        with pytest.raises(EngineFailed, match="no pages"):
            await service.flush_cache()
        return service.failure

    assert served(llm, use) == "MemoryError: no pages"
    monkeypatch.undo()
    for request in [*llm.engine.scheduler.running, *llm.engine.scheduler.waiting]:
        llm.engine.abort(request)


def test_a_call_that_waits_hears_of_the_end(llm):
    class Silent:
        """An engine that goes away without a word."""

        def __init__(self):
            self.facts = EngineThread(llm).facts
            self.sock, self.theirs = socket.socketpair()

        def fate(self):
            return "it went away"

        def close(self):
            pass

    async def go():
        engine = Silent()
        service = EngineService(engine)
        await service.start()
        ticket, flush = service.submit([1], params(1)), asyncio.create_task(service.flush_cache())
        await asyncio.sleep(0.05)
        engine.theirs.close()
        [last] = await all_of(ticket)
        with pytest.raises(EngineFailed, match="it went away"):
            await flush
        return last.error

    assert asyncio.run(go()) == "the engine failed: it went away"


def test_nonsense_from_the_engine_is_a_failure(llm):
    async def use(service):
        service._engine._theirs.sendall(b"\0\0\0\0\0\0\0\3abc")
        await asyncio.wait_for(service.ended(), 5)
        return service.failure

    assert "makes no sense: UnpicklingError" in served(llm, use)


@pytest.fixture
def own(tmp_path) -> LLM:
    """An engine whose weights may change, and beside it a checkpoint with others."""
    init_checkpoint("k3", tmp_path / "old", seed=0)
    init_checkpoint("k3", tmp_path / "new", seed=1)
    return LLM(tmp_path / "old", max_seqs=2, max_len=256, prefill_chunk=64)


def tokens_of(path, prompt, count) -> list[int]:
    return LLM(path, max_seqs=2, max_len=256).generate([prompt], params(count))[0].outputs[0].token_ids


def said(updates) -> list[int]:
    return [token for update in updates for token in update.token_ids]


def test_an_update_waits_for_what_runs_and_what_comes_waits_for_it(own, tmp_path):
    prompt = [72, 105] * 70  # pages that the prefix cache keeps
    old, new = (tokens_of(tmp_path / name, prompt, 24) for name in ("old", "new"))
    assert old != new

    async def use(service):
        running = service.submit(prompt, params(24))
        await anext(running)
        update = asyncio.create_task(service.update_weights(tmp_path / "new"))
        await asyncio.sleep(0)
        assert service.updating
        late, left = service.submit(prompt, params(24)), service.submit([1], params(24))
        left.abort()
        with pytest.raises(ValueError, match="the weights are being replaced already"):
            await service.update_weights(tmp_path / "old")
        before, after, dropped = await asyncio.gather(*map(all_of, (running, late, left)))
        assert not service.updating
        return before, after, dropped, await update

    before, after, dropped, (written, paused) = served(own, use)
    assert (old[: -len(said(before))] + said(before), said(after)) == (old, new)
    assert after[0].cached_tokens == 0
    assert [u.finish_reason for u in dropped] == ["abort"]
    assert (written, paused) == (len(own.model.state_dict()), 1)


def test_an_update_may_end_what_runs(own, tmp_path):
    async def use(service):
        running = [service.submit([i + 1], params(240)) for i in range(3)]
        await anext(running[0])
        await service.update_weights(tmp_path / "new", abort=True)
        ended = [(await all_of(ticket))[-1].finish_reason for ticket in running]
        return ended, said(await all_of(service.submit([7], params(12))))

    assert served(own, use) == (["abort"] * 3, tokens_of(tmp_path / "new", [7], 12))


def test_a_refused_update_changes_nothing(own, tmp_path):
    old = tokens_of(tmp_path / "old", [7], 12)
    torn = tmp_path / "torn"
    torn.mkdir()
    tensors = load_file(tmp_path / "new" / "model.safetensors")
    name = next(name for name in tensors if name.endswith("layers.0.self_attn.q_proj.weight"))

    async def use(service):
        with pytest.raises(ValueError, match="nowhere: no such directory"):
            await service.update_weights(tmp_path / "nowhere")
        save_file({n: t for n, t in tensors.items() if n != name}, torn / "model.safetensors")
        with pytest.raises(ValueError, match=r"torn: lacks model\.layers\.0\.self_attn\.q_proj\.weight; need all"):
            await service.update_weights(torn)
        save_file(tensors | {name: tensors[name][:-1].clone()}, torn / "model.safetensors")
        with pytest.raises(ValueError, match=r"q_proj\.weight: shape"):
            await service.update_weights(torn)
        return said(await all_of(service.submit([7], params(12))))

    assert served(own, use) == old


def test_draining_ends_an_update_that_waits(own, tmp_path):
    async def use(service):
        running = service.submit([1], params(60))
        await anext(running)
        update = asyncio.create_task(service.update_weights(tmp_path / "new"))
        await asyncio.sleep(0)
        late = service.submit([1], params(1))
        drain = asyncio.create_task(service.drain(20.0))
        with pytest.raises(EngineFailed, match="shutting down"):
            await update
        await drain
        return [(await all_of(ticket))[-1].finish_reason for ticket in (running, late)]

    assert served(own, use) == ["length", "length"]


def test_profiles_and_flushes(llm, tmp_path):
    async def use(service):
        with pytest.raises(ValueError, match="no profile is being recorded"):
            await service.stop_profile(tmp_path)
        await service.start_profile(tmp_path / "new")
        with pytest.raises(ValueError, match="being recorded already"):
            await service.start_profile(tmp_path)
        await all_of(service.submit([1], params(2)))
        assert await service.flush_cache() is True
        return await service.stop_profile(tmp_path / "new")

    assert json.loads(served(llm, use).read_text())["traceEvents"]


def test_facts_need_no_torch_to_be_read(llm):
    facts = EngineThread(llm).facts
    modules = {name.partition(".")[0] for name in _globals(pickle.dumps(facts))}
    assert modules == {"anabranch", "pathlib"}
    assert json.loads(json.dumps(facts.document))["dtype"] == "float32"


def test_an_adapter_is_a_fact(llm, tmp_path):
    assert facts_of(llm).document["adapter"] is None
    pairs = random_pairs(llm.model.config, ["q_proj", "o_proj"], rank=4)
    adapter = write_adapter(pairs, tmp_path / "adapter")
    names = Counter(name.rpartition(".")[2] for name in pairs)
    document = facts_of(LLM(llm.path, max_seqs=1, max_len=64, lora=adapter)).document["adapter"]
    assert document == {"path": str(adapter), "rank": 4, "scale": 1.5, "projections": names}


def _globals(pickled: bytes) -> set[str]:
    """Modules that a pickle asks for."""
    found = set()

    class Reader(pickle.Unpickler):
        def find_class(self, module, name):
            found.add(module)
            return super().find_class(module, name)

    import io

    Reader(io.BytesIO(pickled)).load()
    return found


@given(st.lists(st.one_of(st.binary(max_size=300), st.lists(st.integers()), st.text()), max_size=8))
def test_messages_arrive_whole_and_in_order(messages):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=lambda: [wire.send(ours, m) for m in messages] + [ours.close()])
        sender.start()
        assert [wire.receive(theirs) for _ in messages] == messages
        sender.join()
        assert wire.has_more(theirs)
        with pytest.raises(EOFError):
            wire.receive(theirs)


def test_a_message_larger_than_any_buffer():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        large = list(range(10**6))
        threading.Thread(target=wire.send, args=(ours, large)).start()
        assert wire.receive(theirs) == large
        assert not wire.has_more(theirs)
