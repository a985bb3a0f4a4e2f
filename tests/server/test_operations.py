"""Routes beside generation, over a scripted engine."""

import pytest
from prometheus_client.parser import text_string_to_metric_families
from server.fakes import FakeService, Site, refused, spell

from anabranch.engine.messages import Update


def families(site: Site) -> dict:
    return {f.name: f for f in text_string_to_metric_families(site.ask("GET", "/metrics").text)}


def value(site: Site, family: str, **labels) -> float:
    [sample] = [s for s in families(site)[f"anabranch:{family}"].samples if labels.items() <= s.labels.items()]
    assert sample.labels["model_name"] == site.app.state.desk.model_name
    return sample.value


def test_health_is_empty():
    response = Site().ask("GET", "/health")
    assert (response.status_code, response.content) == (200, b"")


def test_engine_counters_are_metrics():
    site = Site()
    assert value(site, "state_slots_total") == 4
    assert value(site, "num_requests_running") == value(site, "num_requests_waiting") == 0
    assert value(site, "request_success", finished_reason="stop") == 3
    assert value(site, "eager_steps", reason="no graphs") == 2
    assert value(site, "graph_replays", size="8") == 5
    assert value(site, "fusion_active", name="kda", path="whole") == 1
    expected = "kv_cache_usage_perc state_slots_used prefix_cache_queries prefix_cache_hits prompt_tokens "
    expected += "generation_tokens num_preemptions nonfinite_logits"
    assert {f"anabranch:{name}" for name in expected.split()} <= families(site).keys()


def test_expert_load_is_a_metric_where_it_is_counted():
    assert not [name for name in families(Site()) if "expert" in name or "ep_rank" in name]
    service = FakeService()
    service.facts.document["counts_experts"] = True

    async def expert_load():
        return {"tokens": {"1": [6, 0, 2, 0], "3": [0, 0, 0, 0]}, "by_ep_rank": [6, 2], "imbalance": 1.5}

    service.expert_load = expert_load
    site = Site(service)
    assert [value(site, "expert_tokens", layer=layer) for layer in "13"] == [8, 0]
    assert [value(site, "ep_rank_tokens", ep_rank=rank) for rank in "01"] == [6, 2]
    assert value(site, "expert_imbalance", layer="1") == 3
    assert len(families(site)["anabranch:expert_imbalance"].samples) == 1, "a layer without tokens has no imbalance"
    assert value(site, "ep_rank_imbalance") == 1.5


def test_latencies_count_tokens():
    first, *others = spell("a", "bcd", "e")
    site = Site(FakeService("kl", [first._replace(queue_s=0.3), *others]))
    site.complete(n=2)
    site.chat(stream=True)
    counts = {
        name: next(s.value for s in families(site)[f"anabranch:{name}"].samples if s.name.endswith("_count"))
        for name in ("time_to_first_token_seconds", "inter_token_latency_seconds", "e2e_request_latency_seconds")
    }
    assert list(counts.values()) == [3, 12, 3]
    [waited] = [f for f in families(site).values() if f.name == "anabranch:request_queue_time_seconds"]
    assert {s.name.rpartition("_")[2]: s.value for s in waited.samples if "bucket" not in s.name}["count"] == 3
    assert next(s.value for s in waited.samples if s.name.endswith("_sum")) == pytest.approx(0.9)


def test_two_servers_in_one_process():
    one, two = Site(served_model_name="one"), Site(served_model_name="two")
    one.complete()
    samples = {s.name: s.value for f in families(two).values() for s in f.samples}
    assert samples["anabranch:time_to_first_token_seconds_count"] == 0


def test_models_and_version():
    site = Site()
    [model] = site.ask("GET", "/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny-k3", "model", 2000)
    assert site.ask("GET", "/version").json().keys() == {"version"}
    for path in ("/model_info", "/get_model_info"):
        document = site.ask("GET", path).json()
        assert (document["served_model_name"], document["is_generation"]) == ("tiny-k3", True)
    assert site.ask("GET", "/v1/loads").json()["loads"][0]["num_running_reqs"] == 0


def test_tokens_there_and_back():
    site = Site()
    document = site.post("/tokenize", prompt="hé", return_token_strs=True).json()
    assert document["tokens"] == [104, 195, 169]
    assert document["token_strs"] == ["h", "bytes:\\xc3", "bytes:\\xa9"]
    assert (document["count"], document["max_model_len"]) == (3, 2000)
    assert site.post("/detokenize", tokens=document["tokens"]).json() == {"prompt": "hé"}
    assert site.post("/tokenize", prompt="").json()["tokens"] == []


def test_tokens_of_a_conversation_are_those_of_the_chat():
    site, messages = Site(), [{"role": "user", "content": "hi"}]
    tokens = site.post("/tokenize", messages=messages).json()["tokens"]
    site.chat(messages=messages)
    assert site.service.prompts == [tokens]


@pytest.mark.parametrize(
    ("path", "body", "words"),
    [
        ("/tokenize", {}, "exactly one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "exactly one"),
        ("/tokenize", {"messages": []}, "messages is empty"),
        ("/detokenize", {}, "tokens: Field required"),
        ("/detokenize", {"tokens": [272]}, "not in the vocabulary"),
        ("/detokenize", {"tokens": [-1]}, "not in the vocabulary"),
        ("/detokenize", {"tokens": [10**30]}, "not in the vocabulary"),
        ("/detokenize", {"tokens": ["a"]}, "tokens[0]"),
    ],
)
def test_tokens_refused(path, body, words):
    response = Site().post(path, **body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def test_the_cache_is_flushed():
    site = Site()
    assert site.post("/flush_cache").json() == {"flushed": True}
    assert site.service.flushes == 1


def test_weights_are_replaced(tmp_path):
    site = Site()
    answer = site.post("/update_weights_from_disk", model_path=str(tmp_path), weight_version="step-7")
    assert answer.json() == {"success": True, "message": "17 weights written", "num_paused_requests": 2}
    site.post("/update_weights_from_disk", model_path=str(tmp_path), abort_all_requests=True, load_format="auto")
    assert site.service.updates == [(tmp_path, False), (tmp_path, True)]
    document = site.ask("GET", "/server_info").json()
    assert (document["model_path"], document["tokenizer_path"]) == (str(tmp_path), "tiny-k3")
    assert (document["weight_version"], document["weight_updates"]) == ("step-7", 2)


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({}, "model_path: Field required", "model_path"),
        ({"model_path": 3}, "model_path", "model_path"),
        ({"model_path": "nowhere"}, "nowhere: no such directory; need a local checkpoint directory", None),
        (
            {"model_path": ".", "load_format": "flash_rl"},
            "load_format='flash_rl': accepted are auto, safetensors",
            None,
        ),
        ({"model_path": ".", "flush_cache": False}, "always forgotten", None),
    ],
)
def test_weights_refused(body, words, param):
    site = Site()
    refused(site.post("/update_weights_from_disk", **body), 400, words, param=param)
    assert site.service.updates == []
    document = site.ask("GET", "/server_info").json()
    assert (document["model_path"], document["weight_version"], document["weight_updates"]) == ("tiny-k3", "default", 0)


def test_answers_that_an_update_ends_say_so():
    site = Site(FakeService("k3", [Update(finish_reason="abort")]))
    refused(site.complete(), 500, "the engine aborted this answer")
    site.service.updating = True
    refused(site.complete(), 503, "the weights are being replaced")


def test_profiles(tmp_path):
    refused(Site().post("/start_profile"), 400, "without --profile-dir")
    site = Site(profile_dir=tmp_path)
    refused(site.post("/stop_profile"), 400, "no profile is being recorded")
    assert site.post("/start_profile").json() == {"directory": str(tmp_path)}
    refused(site.post("/start_profile"), 400, "already")
    assert site.post("/stop_profile").json() == {"path": str(tmp_path / "trace-0.json")}
