"""Spec files, workloads and counters: what is accepted, and the one line for what is not."""

import json

import pytest

from anabranch.evidence.schedule import ask_exact, number, plan_runs
from anabranch.evidence.scrape import change, exposes, faults, holds, parse_metrics
from anabranch.evidence.spec import parse_spec
from anabranch.evidence.targets import parse_targets
from anabranch.evidence.workload import Prompt, WorkloadSpec, as_text

ARMS = '[arms.old]\nurl = "http://a"\n[arms.new]\ncommand = "serve {port}"\nexpect = {x = ">0"}\n'
METRICS = """# HELP vllm:num_preemptions_total x
# TYPE vllm:num_preemptions_total counter
vllm:num_preemptions_total{engine="0",model_name="m"} 2.0
# TYPE vllm:request_success_total counter
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 5.0
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 1.0
vllm:request_success_created{engine="0",finished_reason="stop",model_name="m"} 1.7e9
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{model_name="m"} 0.5
# TYPE anabranch:graph_replays_total counter
anabranch:graph_replays_total{model_name="m",size="8"} 12.0
"""


def test_a_schedule():
    spec = parse_spec(ARMS + "[schedule]\npairs = 2\ncontrol = 1\n[exact]\npairs = 1\n")
    runs = plan_runs(spec)
    assert [run.label for run in runs] == ["C1", "C2", "A1", "B1", "A2", "B2"]
    assert [run.slot for run in runs] == ["control-1", "control-2", "old-1", "new-1", "old-2", "new-2"]
    assert [number(run) for run in runs] == [1, 1, 1, 1, 2, 2]
    assert [run.label for run in runs if ask_exact(spec, run)] == ["A1", "B1"]
    turned = parse_spec(ARMS + '[schedule]\npairs = 3\ncontrol = 0\norder = "ABBA"\n')
    assert [run.label for run in plan_runs(turned)] == ["A1", "B1", "B2", "A2", "A3", "B3"]


@pytest.mark.parametrize(("text", "words"), [
    ("x = ", "no TOML"),
    ("", "exactly two"),
    (ARMS + "[arms.third]\nurl = 'http://c'", "3 arms"),
    (ARMS + "[load]\nnum_promts = 3", "'num_promts': accepted are .*num_prompts"),
    (ARMS + "[load]\nnum_prompts = 0", "num_prompts=0"),
    (ARMS + "[load]\ndataset_name = 'alpaca'", "random, custom, sharegpt"),
    (ARMS + "[client]\nbackend = 'grpc'", "openai, openai-chat"),
    (ARMS + "[client]\nbase_url = 'x'", "'base_url'"),
    (ARMS + "[schedule]\norder = 'BA'", "ABAB, ABBA"),
    (ARMS + "[schedule]\npairs = 0", "pairs >= 1"),
    (ARMS + "[compare]\nmetrics = ['speed']", "'speed'"),
    (ARMS + "[compare]\nmetrics = ['p95_ttft_ms']", "95 in compare.percentiles"),
    (ARMS + "[compare]\ngoodput = ['x']", "goodput"),
    (ARMS + "[exact]\nprompts = 0", "asks nothing"),
    (ARMS + "typo = 1", "'typo'"),
    ("[arms.a]\nurl = 'http://a'\ncommand = 'x'\n[arms.b]\nurl = 'http://b'", "exactly one of"),
    ("[arms.a]\nurl = 'http://a'\n[arms.b]\ncommand = 'serve'", "{port}"),
    ("[arms.control]\nurl = 'http://a'\n[arms.b]\nurl = 'http://b'", "'control'"),
])  # fmt: skip
def test_bad_specs(text, words):
    with pytest.raises(ValueError, match=words):
        parse_spec(text)


def test_targets(tmp_path):
    one, two = parse_targets(["http://a"]), parse_targets(["http://a", "http://b"], {"model": "m"})
    assert [arm.name for arm in one.arms] == ["a"]
    assert [arm.url for arm in two.arms] == ["http://a", "http://b"]
    assert two.client_of("http://b").model == "m"
    (tmp_path / "s.toml").write_text(ARMS + "[load]\nvocab_size = 77")
    assert parse_targets([str(tmp_path / "s.toml")]).vocab_size == 77
    for words in ([], ["a"], ["http://a", "b"], ["x.toml"]):
        with pytest.raises(ValueError, match=r"targets|cannot be read"):
            parse_targets(words)


def test_random_prompts_have_exact_lengths_and_no_special_ids():
    spec = WorkloadSpec(num_prompts=5, random_input_len=33, random_output_len=7, vocab_size=163840)
    prompts = spec.prompts()
    assert {len(p.ids) for p in prompts} == {33}
    assert {p.max_tokens for p in prompts} == {7}
    assert max(max(p.ids) for p in prompts) < 163840 - 1024
    assert len({p.sha256 for p in prompts}) == 5
    assert spec.prompts() == prompts
    other = WorkloadSpec(num_prompts=5, random_input_len=33, random_output_len=7, vocab_size=163840, seed=1)
    assert not {p.sha256 for p in other.prompts()} & {p.sha256 for p in prompts}
    assert as_text(prompts, lambda ids: "x" * len(ids))[0] == Prompt(text="x" * 33, max_tokens=7)
    with pytest.raises(ValueError, match="vocab_size"):
        WorkloadSpec().prompts()


def test_ranges_and_prefixes():
    spec = WorkloadSpec(
        num_prompts=200, random_input_len=10, random_range_ratio=0.5, random_prefix_len=4, vocab_size=99
    )
    prompts = spec.prompts()
    assert {len(p.ids) for p in prompts} == set(range(9, 20))
    assert len({p.ids[:4] for p in prompts}) == 1


def test_files_of_prompts(tmp_path):
    (tmp_path / "p").write_text('one\n\n{"prompt": "two", "output_tokens": 3}\n{"prompt": [4, 5]}\n')
    spec = WorkloadSpec(dataset_name="custom", dataset_path=tmp_path / "p", num_prompts=6, custom_output_len=9)
    prompts = spec.prompts()
    one, two, ids = Prompt(text="one", max_tokens=9), Prompt(text="two", max_tokens=3), Prompt(ids=(4, 5), max_tokens=9)
    assert set(prompts[:3]) == {one, two, ids}
    assert prompts[3:] == prompts[:3]
    talk = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "ho"}]}
    (tmp_path / "s").write_text(json.dumps([talk, {"conversations": []}]))
    shared = WorkloadSpec(dataset_name="sharegpt", dataset_path=tmp_path / "s", num_prompts=1, custom_output_len=9)
    assert shared.prompts() == [Prompt(text="hi", max_tokens=9)]


@pytest.mark.parametrize(("kind", "text", "words"), [
    ("custom", "", "no prompts"),
    ("custom", '{"text": 1}', "line 1"),
    ("sharegpt", "{", "ShareGPT"),
    ("sharegpt", "[]", "no conversation"),
])  # fmt: skip
def test_bad_files(tmp_path, kind, text, words):
    (tmp_path / "f").write_text(text)
    with pytest.raises(ValueError, match=words):
        WorkloadSpec(dataset_name=kind, dataset_path=tmp_path / "f").prompts()


def test_counters():
    found = parse_metrics(METRICS)
    assert found == {
        "num_preemptions": 2.0,
        "request_success{finished_reason=length}": 5.0,
        "request_success{finished_reason=stop}": 1.0,
        "graph_replays{size=8}": 12.0,
    }
    assert change({"num_preemptions": 2.0}, found)["num_preemptions"] == 0.0
    assert exposes(found, "request_success")
    assert not exposes(found, "request")
    wrong = faults(found, {"request_success": "6", "graph_replays": ">=13", "kda.whole": ">0", "gone": "0"}, False)
    assert wrong == [
        "counter num_preemptions is 2, expected ==0",
        "counter graph_replays is 12, expected >=13",
        "counter kda.whole is not exposed, expected >0",
    ]
    assert faults(found, {"num_preemptions": "any"}, False) == []


def test_cache_hits_are_faults_unless_they_are_wanted():
    hits = {"prefix_cache_hits": 64.0}
    assert faults(hits, {}, allow_cached=False)
    assert not faults(hits, {}, allow_cached=True)


def test_expectations():
    assert holds("0", 0.0)
    assert holds(" <= 2.5", 2.5)
    assert not holds("!=3", 3.0)
    with pytest.raises(ValueError, match="'lots'"):
        holds("lots", 1.0)
