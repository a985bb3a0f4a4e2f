"""/v1/chat/completions over a scripted engine."""

import pytest
from server.events import chunks
from server.fakes import FakeService, Site, refused, spell

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
THOUGHT = ("I think", "<|close|>think<|sep|>", "<|open|>response<|sep|>", "Hel", "lo", "<|close|>response<|sep|>")
CALLED = (
    "<|close|>think<|sep|><|open|>tools<|sep|>",
    '<|open|>call tool="weather" index="1"<|sep|>',
    '<|open|>argument key="city" type="string"<|sep|>Par',
    "is<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
)
CALLED_KL = (
    "Let me see.<|tool_calls_section_begin|>",
    "<|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>",
    '{"city":',
    ' "Paris"}<|tool_call_end|><|tool_calls_section_end|>',
)


def site_of(pieces, architecture="k3", reason="stop", **settings):
    return Site(FakeService(architecture, spell(*pieces, reason=reason)), **settings)


def joined(found: list[dict], field: str) -> str:
    return "".join(c["choices"][0]["delta"].get(field) or "" for c in found)


def test_reasoning_and_content():
    choice = site_of(THOUGHT).chat().json()["choices"][0]
    assert choice["message"] == {"role": "assistant", "content": "Hello", "reasoning_content": "I think"}
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)


def test_reasoning_and_content_as_a_stream():
    found = chunks(site_of(THOUGHT).chat(stream=True).content)
    assert found[0]["object"] == "chat.completion.chunk"
    assert found[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert (joined(found, "reasoning_content"), joined(found, "content")) == ("I think", "Hello")
    reasons = [c["choices"][0]["finish_reason"] for c in found]
    assert reasons == [None] * (len(found) - 1) + ["stop"]
    assert sum("role" in c["choices"][0]["delta"] for c in found) == 1


@pytest.mark.parametrize(("architecture", "pieces"), [("k3", CALLED), ("kl", CALLED_KL)])
def test_tool_calls(architecture, pieces):
    site = site_of(pieces, architecture)
    choice = site.chat(tools=[WEATHER]).json()["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    [call] = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Paris"}'}
    # Kimi-Linear's markers are special tokens, and must come through
    assert site.service.skip_special == [architecture == "k3"]
    found = chunks(site.chat(tools=[WEATHER], stream=True).content)
    calls = [c["choices"][0]["delta"]["tool_calls"][0] for c in found if "tool_calls" in c["choices"][0]["delta"]]
    assert calls[0]["function"] == {"name": "weather", "arguments": ""}
    assert calls[0]["type"] == "function"
    assert "".join(c["function"]["arguments"] for c in calls) == '{"city": "Paris"}'
    assert found[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_a_call_cut_off_keeps_its_reason():
    choice = site_of(CALLED[:3], reason="length").chat(tools=[WEATHER]).json()["choices"][0]
    assert choice["finish_reason"] == "length"


def test_what_the_parser_held_back_comes_with_the_end():
    site = site_of(("<|close|>think<|sep|><|open|>response<|sep|>", "1 <"))
    assert site.chat().json()["choices"][0]["message"]["content"] == "1 <"
    assert joined(chunks(site.chat(stream=True).content), "content") == "1 <"


def test_forbidden_calls_stay_text():
    message = site_of(CALLED).chat(tools=[WEATHER], tool_choice="none").json()["choices"][0]["message"]
    assert "tool_calls" not in message


def test_without_a_parser_text_is_raw():
    site = site_of(THOUGHT, parser="none")
    assert site.chat().json()["choices"][0]["message"] == {"role": "assistant", "content": "".join(THOUGHT)}
    assert joined(chunks(site.chat(stream=True).content), "content") == "".join(THOUGHT)


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_cover_every_token_whatever_the_parser_holds_back(stream):
    response = site_of(THOUGHT).chat(logprobs=True, top_logprobs=2, stream=stream, return_token_ids=True)
    if stream:
        found = chunks(response.content)
        assert found[0]["prompt_token_ids"]
        assert all("prompt_token_ids" not in c for c in found[1:])
        parts = [c["choices"][0] for c in found]
    else:
        assert response.json()["prompt_token_ids"]
        parts = response.json()["choices"]
    entries = [e for p in parts for e in (p["logprobs"] or {"content": []})["content"]]
    text = "".join(THOUGHT)
    assert "".join(e["token"] for e in entries) == text
    assert [t for p in parts for t in p.get("token_ids", [])] == list(text.encode())
    assert entries[0] == {
        "token": "I",
        "logprob": -0.5,
        "bytes": [73],
        "top_logprobs": [
            {"token": "I", "logprob": -0.5, "bytes": [73]},
            {"token": "\0", "logprob": -9999.0, "bytes": [0]},
        ],
    }


def test_limits_of_the_answer():
    site = site_of(["ok"])
    site.chat(max_tokens=5)
    site.chat(max_tokens=5, max_completion_tokens=6)
    site.chat()
    given = [p.max_tokens for p in site.service.params]
    assert given[:2] == [5, 6]
    assert given[2] == site.service.facts.limits.context - len(site.service.prompts[2])


def test_a_prompt_longer_than_the_context():
    response = site_of(["ok"]).chat(messages=[{"role": "user", "content": "x" * 3000}])
    refused(response, 400, "exceeds the context", param="max_tokens")


def test_text_parts_and_names_render():
    site = site_of(["ok"])
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert site.chat(
        messages=[{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    ).is_success


def _ending(site: Site) -> str:
    words = site.service.tokenizer
    return words.decode(site.service.prompts[-1], skip_special=False)


@pytest.mark.parametrize(
    ("body", "effort", "channel"),
    [
        ({}, "max", "think"),
        ({"reasoning_effort": "low"}, "low", "think"),
        ({"chat_template_kwargs": {"thinking_effort": "high"}}, "high", "think"),
        ({"chat_template_kwargs": {"thinking": False}}, None, "response"),
        ({"reasoning_effort": "none"}, None, "response"),
    ],
)
def test_thinking(body, effort, channel):
    site = site_of(["x"])
    message = site.chat(**body).json()["choices"][0]["message"]
    assert _ending(site).endswith(f"<|open|>{channel}<|sep|>")
    assert (f"`thinking_effort={effort}`" in _ending(site)) == (effort is not None)
    assert message.get("reasoning_content") == ("x" if channel == "think" else None)


@pytest.mark.parametrize(
    ("body", "words", "param"),
    [
        ({"messages": []}, "messages is empty", "messages"),
        ({"messages": "hi"}, "messages: Input should be a valid list", "messages"),
        (
            {"messages": [{"role": "wizard", "content": "x"}]},
            "messages[0] has role 'wizard'; accepted: system",
            "messages",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "accepted: text", "messages"),
        ({"messages": [{"role": "user"}]}, "has no content", "messages"),
        ({"messages": [3]}, "messages[0]: Input should be a valid dictionary", "messages[0]"),
        ({"reasoning_effort": "medium"}, "accepted: low, high, max", None),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"thinking_effort": "max"}}, "contradicts", None),
        ({"chat_template_kwargs": {"thinking": "yes"}}, "need thinking as true or false", None),
        ({"chat_template_kwargs": {"enable_thinking": True}}, "accepted: thinking, thinking_effort", None),
        ({"tool_choice": "required"}, "needs tools", "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function"}}, "accepted: auto, none, required", None),
        ({"response_format": {"type": "json_object"}}, "'json_object' is not supported; accepted: text", None),
        ({"top_logprobs": 2}, "needs logprobs=true", None),
        ({"logprobs": True, "top_logprobs": 21}, "0..20", "logprobs"),
        ({"tools": [WEATHER], "parallel_tool_calls": False}, "parallel_tool_calls=false is not supported", None),
        ({"functions": []}, "use tools and tool_choice", None),
    ],
)
def test_what_is_refused(body, words, param):
    response = site_of(["ok"]).chat(**body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]
    if param:
        assert response.json()["error"]["param"] == param


def test_kimi_linear_has_no_thinking():
    refused(site_of(["ok"], "kl").chat(chat_template_kwargs={"thinking": True}), 400, "no thinking")


def test_response_format_text_is_the_default():
    assert site_of(["ok"]).chat(response_format={"type": "text"}).status_code == 200


def test_several_answers():
    site = site_of(THOUGHT)
    document = site.chat(n=3, seed=1).json()
    assert [c["index"] for c in document["choices"]] == [0, 1, 2]
    assert [p.seed for p in site.service.params] == [1, 2, 3]
    assert document["usage"]["prompt_tokens"] == 7
