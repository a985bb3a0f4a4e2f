"""The Python API on real checkpoint files: batches, streams, chat, several answers, scores, and its refusals."""

import json

import pytest

from anabranch import LLM, FusionConfig, SamplingParams
from anabranch.models.tiny import init_checkpoint, tiny_config

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module", params=["kl", "k3"])
def llm(request, tmp_path_factory) -> LLM:
    path = tmp_path_factory.mktemp(request.param)
    init_checkpoint(request.param, path)
    return LLM(path, max_seqs=4, max_len=512, deterministic=True)


def test_results_come_in_the_order_of_the_prompts(llm):
    prompts = ["one", "a longer prompt than the others", "三", "x" * 100, "e"]
    together = llm.generate(prompts, GREEDY)
    assert [o.prompt for o in together] == prompts
    for prompt, output in zip(prompts, together, strict=True):
        alone = llm.generate(prompt, GREEDY)[0]
        assert alone.outputs[0].token_ids == output.outputs[0].token_ids
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
        assert output.outputs[0].finish_reason == "length"
        assert 0 < output.time_to_first_token <= output.seconds


def test_streamed_pieces_add_up(llm):
    whole = llm.generate("stream me", GREEDY)[0].outputs[0]
    *pieces, last = llm.stream("stream me", GREEDY)
    assert "".join(pieces) == last.outputs[0].text == whole.text
    assert last.outputs[0].token_ids == whole.token_ids


def test_closing_a_stream_frees_its_memory(llm):
    stream = llm.stream("never finished", SamplingParams(max_tokens=200, temperature=0.0, ignore_eos=True))
    next(stream)
    stream.close()
    assert len(llm.engine.scheduler.slots) == 4
    assert not llm.engine.busy


def test_each_prompt_may_have_its_own_parameters(llm):
    short, long = llm.generate(
        ["a", "b"], [SamplingParams(max_tokens=2), SamplingParams(max_tokens=5, ignore_eos=True)]
    )
    assert len(short.outputs[0].token_ids) <= 2
    assert len(long.outputs[0].token_ids) == 5
    with pytest.raises(ValueError, match="1 sampling params for 2 prompts"):
        llm.generate(["a", "b"], [GREEDY])


def test_several_answers_use_following_seeds(llm):
    many = llm.generate("roll", SamplingParams(n=3, seed=5, max_tokens=8, ignore_eos=True))[0].outputs
    singles = [
        llm.generate("roll", SamplingParams(seed=5 + i, max_tokens=8, ignore_eos=True))[0].outputs[0] for i in range(3)
    ]
    assert [o.token_ids for o in many] == [o.token_ids for o in singles]
    assert len({tuple(o.token_ids) for o in many}) > 1


def test_a_stop_string_ends_the_answer_and_is_left_out(llm):
    whole = llm.generate("stop", GREEDY)[0].outputs[0]
    stop = whole.text[3:5]
    cut = llm.generate("stop", SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True, stop=(stop,)))[0]
    assert cut.outputs[0].text == whole.text[: whole.text.index(stop)]
    assert cut.outputs[0].finish_reason == "stop"


def test_chat_uses_the_models_own_format(llm):
    messages = [{"role": "user", "content": "hi"}]
    ids = llm.chat_prompt(messages)
    assert llm.chat(messages, GREEDY).prompt_token_ids == ids
    assert "hi" in llm.tokenizer.decode(ids, skip_special=False)


def test_wrong_tokens_are_refused_by_number(llm):
    with pytest.raises(ValueError, match="token id 99999 is outside the vocabulary"):
        llm.generate([[1, 99999]], GREEDY)
    with pytest.raises(ValueError, match="exceeds the context of 512"):
        llm.generate("x" * 600, GREEDY)


def test_every_fused_path_gives_the_same_answers(llm):
    want = llm.generate(["paths"], GREEDY)[0].outputs[0]
    for kda in ("separate", "split", "whole"):
        other = LLM(llm.path, fusion=FusionConfig(kda=kda), deterministic=True, max_seqs=1, max_len=64)
        got = other.generate(["paths"], GREEDY)[0].outputs[0]
        assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)


def test_dummy_weights_need_a_config_alone(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(tiny_config("kl")))
    dummy = LLM(tmp_path, load_format="dummy", max_seqs=1, max_len=64)
    out = dummy.generate([[1, 2, 3]], GREEDY)[0].outputs[0]
    assert (len(out.token_ids), out.text) == (12, "")
    with pytest.raises(ValueError, match="no tokenizer; give the prompt as token ids"):
        dummy.generate("text", GREEDY)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_seqs": 0}, "max_seqs=0: need at least 1"),
        ({"state_dtype": "float16"}, "state_dtype='float16': accepted are float32, bfloat16"),
        ({"memory_fraction": 2.0}, "memory_fraction=2.0"),
        ({"prefill_chunk": 0}, "prefill_chunk=0"),
        ({"dtype": "int8"}, "dtype='int8'"),
        ({"ops": {"conv": "cuda"}}, "op conv=cuda: accepted are"),
    ],
)
def test_wrong_options_are_one_line(tmp_path, options, message):
    init_checkpoint("kl", tmp_path)
    with pytest.raises(ValueError, match=message) as error:
        LLM(tmp_path, **options)
    assert "\n" not in str(error.value)


def test_a_bf16_state_stays_close(tmp_path):
    init_checkpoint("kl", tmp_path)
    texts = []
    for state in ("float32", "bfloat16"):
        small = LLM(tmp_path, state_dtype=state, max_seqs=1, max_len=128)
        assert small.memory.bytes_per_slot < 200_000
        texts.append(small.generate(["state"], GREEDY)[0].outputs[0].logprobs[0])
    assert texts[0] == pytest.approx(texts[1], abs=0.1)
