"""The real engine behind a real socket, spoken to by the client that most people use."""

import http.client
import json
import socket
import threading

import httpx
import openai
import pytest

from anabranch.engine.llm import LLM
from anabranch.engine.sampling import SamplingParams
from anabranch.models.tiny import init_checkpoint

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
HELLO = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module", params=["k3", "kl"])
def live(request):
    return request.getfixturevalue(request.param)


@pytest.fixture(scope="module")
def client(live):
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def name(live):
    return live.app.state.desk.model_name


def test_models(client, name):
    assert [model.id for model in client.models.list()] == [name]


def test_a_completion_is_what_the_engine_computes(client, name, live):
    answer = client.completions.create(model=name, prompt="Hello", max_tokens=8, temperature=0, logprobs=2)
    llm = LLM(live.llm.path, max_seqs=1, max_len=64)
    expected = llm.generate(["Hello"], SamplingParams(max_tokens=8, temperature=0)).pop().outputs[0]
    assert answer.choices[0].text == expected.text
    assert answer.choices[0].logprobs.token_logprobs == pytest.approx(expected.logprobs, abs=1e-4)
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, len(expected.token_ids))


def test_streamed_and_whole_answers_are_equal(client, name):
    options = {"model": name, "messages": HELLO, "max_tokens": 24, "seed": 5}
    whole = client.chat.completions.create(**options, logprobs=True).choices[0]
    chunks = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(d.content or "" for d in deltas) == whole.message.content
    reasoning = "".join(getattr(d, "reasoning_content", None) or "" for d in deltas)
    assert reasoning == (getattr(whole.message, "reasoning_content", None) or "")
    assert chunks[-1].usage.completion_tokens == len(whole.logprobs.content)
    assert chunks[-2].choices[0].finish_reason == whole.finish_reason


def test_tools_and_several_answers(client, name):
    answer = client.chat.completions.create(model=name, messages=HELLO, tools=[WEATHER], max_tokens=8, n=3, seed=1)
    assert len({choice.message.model_dump_json() for choice in answer.choices}) > 1
    again = client.chat.completions.create(model=name, messages=HELLO, tools=[WEATHER], max_tokens=8, n=3, seed=1)
    assert [c.message for c in again.choices] == [c.message for c in answer.choices]


def test_errors_are_those_of_the_client(client, name):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(model=name, messages=HELLO, temperature=-1)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt", messages=HELLO)
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model=name, prompt="x" * 2000, max_tokens=8)
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        client.completions.create(model=name, prompt=[5000], max_tokens=8)


def test_a_prompt_is_scored_alike_alone_and_with_an_answer(client, name):
    """As lm-eval asks: echo, one token more, alternatives whose best equals the greedy token's own value."""
    options = {"model": name, "prompt": [72, 101, 108], "echo": True, "logprobs": 1, "temperature": 0}
    alone = client.completions.create(**options, max_tokens=0).choices[0].logprobs
    more = client.completions.create(**options, max_tokens=1).choices[0].logprobs
    assert alone.tokens == ["H", "e", "l"]
    assert more.token_logprobs[:3] == pytest.approx(alone.token_logprobs)
    assert more.token_logprobs[3] == max(more.top_logprobs[3].values())
    assert all(
        max(top.values()) >= own for own, top in zip(more.token_logprobs[1:], more.top_logprobs[1:], strict=True)
    )


def test_weights_from_disk(k3, tmp_path):
    """Over the wire: the same weights again change no answer, others do, and a refusal neither."""
    options = {"prompt": [5, 6, 7], "max_tokens": 16, "temperature": 0, "return_token_ids": True}

    def answer():
        return httpx.post(f"{k3.url}/v1/completions", json=options, timeout=30).json()["choices"][0]["token_ids"]

    def update(path):
        return httpx.post(f"{k3.url}/update_weights_from_disk", json={"model_path": str(path)}, timeout=60)

    init_checkpoint("k3", tmp_path / "other", seed=9)
    first = answer()
    assert update(tmp_path / "other").json()["success"] is True
    assert answer() != first
    assert httpx.get(f"{k3.url}/server_info").json()["model_path"] == str(tmp_path / "other")
    assert update(k3.llm.path).json()["num_paused_requests"] == 0
    assert answer() == first
    refused = update(tmp_path)
    assert (refused.status_code, "no safetensors file" in refused.json()["error"]["message"]) == (400, True)
    assert answer() == first
    assert httpx.get(f"{k3.url}/server_info").json()["weight_updates"] == 2


def _post(live, body: dict, declared: int | None = None) -> socket.socket:
    raw = json.dumps(body).encode()
    sock = socket.create_connection(("127.0.0.1", live.port))
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    sock.sendall(f"{head}Content-Length: {declared or len(raw)}\r\n\r\n".encode() + raw)
    return sock


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_slot(k3, stream):
    sock = _post(k3, {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True, "stream": stream})
    k3.wait(lambda: k3.service.stats()["slots_used"] == 1)
    if stream:
        assert b"200 OK" in sock.recv(100)
    sock.close()
    k3.wait(k3.idle, 5)
    assert k3.service.stats()["finished"].get("abort", 0) >= 1


def test_clients_that_leave_a_full_queue(k3):
    body = {"prompt": "Hi", "max_tokens": 900, "ignore_eos": True, "n": 3}
    socks = [_post(k3, body | {"stream": i % 2 == 0}) for i in range(4)]
    k3.wait(lambda: k3.app.state.desk.in_progress == 12)
    assert k3.service.stats()["slots_total"] == 4
    for sock in socks:
        sock.close()
    k3.wait(k3.idle, 5)


def test_half_a_body_is_given_up(k3):
    sock = _post(k3, {"prompt": "Hi"}, declared=1000)
    sock.settimeout(5)
    assert b" 408 " in sock.recv(200)
    sock.close()
    left = _post(k3, {"prompt": "Hi"}, declared=1000)
    left.close()
    assert httpx.get(f"{k3.url}/health").status_code == 200


def test_ten_megabytes(k3):
    prompt = "x" * (10 << 20)
    response = httpx.post(f"{k3.url}/v1/completions", json={"prompt": prompt, "max_tokens": 1}, timeout=30)
    assert response.status_code == 400
    assert "context" in response.json()["error"]["message"]


def test_an_endless_body(k3):
    connection = http.client.HTTPConnection("127.0.0.1", k3.port, timeout=10)

    def endless():
        for _ in range(40):
            yield b"x" * (1 << 20)

    try:
        connection.request("POST", "/v1/completions", endless(), {"Content-Type": "application/json"})
    except (BrokenPipeError, ConnectionResetError):
        return  # the server has closed the connection, as it may
    assert connection.getresponse().status == 413


def test_requests_that_overlap(k3):
    found = {}

    def ask(i: int) -> None:
        body = {"prompt": f"prompt {i % 3}", "max_tokens": 10, "temperature": 0}
        found[i] = httpx.post(f"{k3.url}/v1/completions", json=body, timeout=30).json()["choices"][0]["text"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9
    assert k3.idle()


def test_server_info_tells_every_choice(live):
    httpx.post(f"{live.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2}, timeout=20)
    document = httpx.get(f"{live.url}/server_info").json()
    assert httpx.get(f"{live.url}/get_server_info").json().keys() == document.keys()
    assert [f["kind"] for f in document["fusions"]] == ["kda", "mla"]
    for fusion in document["fusions"]:
        assert fusion["reason"]
        assert fusion["chosen"] in [path["path"] for path in fusion["paths"] if path["ok"]]
        assert all(path["reason"] for path in fusion["paths"])
    assert all(op["implementation"] and op["reason"] for op in document["ops"].values())
    assert document["footprint"]["weight_bytes"] > 0
    assert document["layout"]["ranks"] == 1
    assert document["counters"]
    assert "api_key" not in document["settings"]


def test_cached_tokens_are_reported(k3):
    body = {"prompt": "a long prompt that is worth keeping " * 8, "max_tokens": 2, "temperature": 0}
    first, second = (httpx.post(f"{k3.url}/v1/completions", json=body, timeout=20).json() for _ in range(2))
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert second["choices"][0]["text"] == first["choices"][0]["text"]
    assert httpx.post(f"{k3.url}/flush_cache").json() == {"flushed": True}


def test_a_profile_is_a_chrome_trace(k3):
    assert httpx.post(f"{k3.url}/start_profile", timeout=30).status_code == 200
    httpx.post(f"{k3.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 2}, timeout=20)
    path = httpx.post(f"{k3.url}/stop_profile", timeout=30).json()["path"]
    with open(path, encoding="utf-8") as file:
        assert json.load(file)["traceEvents"]
