"""Prompts through the engine on a real GPU, four layers of Kimi-Linear-48B: chunk ends, prefix cache, host waits.

Numbers of checks refer to the functional specification, section 7.
"""

import hashlib
import json
import random
import warnings
from pathlib import Path

import pytest
import torch

from anabranch import LLM, SamplingParams

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

CHUNK = 2048
LENGTHS = (1024, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 4 * CHUNK)
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    config = json.loads((Path(__file__).parents[1] / "data/configs/kimi_linear_48b_config.json").read_text())
    config |= {"num_hidden_layers": 4, "num_experts": 32}
    kinds = config["linear_attn_config"]
    for name in ("kda_layers", "full_attn_layers"):
        kinds[name] = [i for i in kinds[name] if i <= 4]
    path = tmp_path_factory.mktemp("prompts")
    (path / "config.json").write_text(json.dumps(config))
    return path


def make(model: Path, chunk: int = CHUNK, **options) -> LLM:
    return LLM(model, load_format="dummy", prefill_chunk=chunk, max_seqs=8, max_len=8448, graph_sizes=[1, 8], **options)


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(160_000) for _ in range(length)]


def said(outputs) -> list[tuple[list[int], list[float]]]:
    return [(o.outputs[0].token_ids, o.outputs[0].logprobs) for o in outputs]


def test_answers_do_not_know_where_chunks_end(model):
    """Checks 18, 32: one chunk or four, each length twice, alone or eight at once: equal ids and log probabilities."""
    prompts = [prompt(length, length) for length in LENGTHS]
    with make(model, 4 * CHUNK, deterministic=True, prefix_cache=False) as llm:
        want = [said(llm.generate([p], GREEDY))[0] for p in prompts]
    assert len({token for tokens, _ in want for token in tokens}) > 16, "degenerate answers prove nothing"
    with make(model, deterministic=True, prefix_cache=False) as llm:
        for _ in range(2):
            for p, expected in zip(prompts, want, strict=True):
                [got] = said(llm.generate([p], GREEDY))
                assert hashlib.sha256(str(got).encode()).digest() == hashlib.sha256(str(expected).encode()).digest()
        assert said(llm.generate([*prompts, prompts[0], prompts[3]], GREEDY)) == [*want, want[0], want[3]]


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_cached_prefix_of_130_tokens_is_the_state_after_128(model, deterministic):
    """Check 21."""
    shared, ends = prompt(130, 1), [prompt(40, 2), prompt(40, 3)]
    with make(model, deterministic=deterministic) as llm:
        llm.generate([shared], GREEDY)
        warm = llm.generate([shared + end for end in ends], GREEDY)
        assert [o.cached_tokens for o in warm] == [128, 128]
        assert llm.engine.scheduler.prefix is not None
        llm.engine.scheduler.prefix.flush()
        cold = llm.generate([shared + end for end in ends], GREEDY)
        assert [o.cached_tokens for o in cold] == [0, 0]
    for (ids, scores), (cold_ids, cold_scores) in zip(said(warm), said(cold), strict=True):
        if deterministic:
            assert (ids, scores) == (cold_ids, cold_scores)
        else:
            assert scores[0] == pytest.approx(cold_scores[0], abs=0.05)


def test_the_layers_of_a_prompt_never_wait_for_the_device(model):
    """Check 45: nothing between a step's inputs and its logits makes the host wait."""
    with make(model, prefix_cache=False) as llm:
        llm.generate([prompt(1200, 4)], GREEDY)
        inner, waits = llm.model.forward, []

        def forward(*args, **kwargs):
            torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                logits = inner(*args, **kwargs)
            torch.cuda.set_sync_debug_mode("default")
            waits.append([str(w.message) for w in caught if "synchronizing" in str(w.message)])
            return logits

        llm.model.forward = forward
        for length in (1200, CHUNK + 1100):  # longer than what is replayed from a graph
            llm.generate([prompt(length, length)], SamplingParams(temperature=0.0, max_tokens=1))
    assert len(waits) == 3, "two chunks of the last prompt"
    assert not any(waits), waits


@pytest.mark.parametrize("channels", [8191, 8192, 8193])
def test_one_convolution_of_q_k_v_has_the_bits_of_three(channels):
    """Check 23: also where the three together pass 32 MiB."""
    from anabranch.ops.conv.triton import conv
    from anabranch.ops.segments import Segments

    torch.manual_seed(channels)
    tokens = 32 * 2**20 // (2 * 3 * channels) + 1
    x = torch.randn(tokens, 3 * channels, device="cuda").bfloat16()
    weight, pool = (
        torch.randn(3 * channels, 4, device="cuda"),
        torch.randn(2, 3, 3 * channels, device="cuda").bfloat16(),
    )
    segments, slots = Segments.of([tokens - 1, 1], device="cuda"), torch.tensor([1, 0], device="cuda")
    parts = [slice(i * channels, (i + 1) * channels) for i in range(3)]
    pools = [pool[:, :, part].contiguous() for part in parts]
    apart = [conv(x[:, p], segments, slots, s, weight[p].contiguous()) for p, s in zip(parts, pools, strict=True)]
    assert torch.equal(conv(x, segments, slots, pool, weight), torch.cat(apart, 1))
    assert torch.equal(pool, torch.cat(pools, 2))


def test_prefill_writes_nothing_that_it_reads():
    """Check 22: v as it came, dense, whatever memory the output takes."""
    from helpers.kda_prefill import prompt_inputs

    from anabranch.ops.registry import IMPLEMENTATIONS

    for implementation in IMPLEMENTATIONS["kda_prefill"]:
        if implementation.name not in ("cuda", "chunked"):
            continue
        if not implementation.verdict(None, torch.device("cuda"), deterministic=False).ok:
            continue
        module = __import__(f"anabranch.ops.kda_prefill.{implementation.name}", fromlist=["kda_prompt"])
        given = prompt_inputs([130, 64], 12, "bounded", device="cuda")
        tensors = {k: v for k, v in given.items() if isinstance(v, torch.Tensor) and k != "state"}
        before = {k: v.clone() for k, v in tensors.items()}
        out = module.kda_prompt(**given)
        assert all(out.untyped_storage().data_ptr() != v.untyped_storage().data_ptr() for v in tensors.values())
        assert all(torch.equal(tensors[k], before[k]) for k in before), implementation.name


@pytest.mark.parametrize("eager", [True, False])
def test_a_thousand_tokens_are_one_step_and_leave_the_state_after_960(model, eager):
    head, ends = prompt(960, 11), [prompt(40, 12), prompt(40, 13)]
    with make(model, eager=eager) as llm:
        runner, steps = llm.engine.runner, []
        assert runner.saves
        launch = runner.launch

        def counted(segments, *args):
            steps.extend(count for request, count in segments if not request.decoding)
            return launch(segments, *args)

        runner.launch = counted
        [first] = llm.generate([head + ends[0]], GREEDY)
        [warm] = llm.generate([head + ends[1]], GREEDY)
        assert runner.prompt_replays == ({} if eager else {1024: 1, 64: 1}), "what follows a prefix is replayed too"
        assert llm.engine.scheduler.prefix is not None
        llm.engine.scheduler.prefix.flush()
        [cold] = llm.generate([head + ends[1]], GREEDY)
        assert [o.cached_tokens for o in (first, warm, cold)] == [0, 960, 0]
        assert steps == [1000, 40, 1000]
    [(ids, scores), (cold_ids, cold_scores)] = said([warm, cold])
    assert scores[0] == pytest.approx(cold_scores[0], abs=0.05)
    print(f"eager={eager}: {sum(a == b for a, b in zip(ids, cold_ids, strict=True))} of 16 tokens equal")


def test_what_is_left_of_a_prompt_is_replayed(model):
    """The last chunk of a long prompt, and a chat's turns behind their prefix, but no long one."""
    long, turns = prompt(CHUNK + 100, 21), [prompt(n, 22 + n) for n in (9, 150, 300)]
    found = []
    with make(model) as llm:
        runner = llm.engine.runner
        for graphs in (runner.prompts, None):
            runner.prompts = graphs
            runner.prompt_replays.clear()
            assert llm.engine.flush()
            outputs = llm.generate([long], GREEDY)
            for turn in turns:
                outputs += llm.generate([long + turn], GREEDY)
            assert [o.cached_tokens for o in outputs] == [0, 2112, 2112, 2112]
            found.append((dict(runner.prompt_replays), said(outputs)))
    (replays, got), (none, want) = found
    assert replays == {128: 1, 64: 1, 256: 1}, "100, 36 + 9 and 36 + 150 tokens; 36 + 300 are eager"
    assert not none
    for (_, scores), (_, eager_scores) in zip(got, want, strict=True):
        assert scores[0] == pytest.approx(eager_scores[0], abs=0.05)
