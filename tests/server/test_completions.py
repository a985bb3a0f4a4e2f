"""/v1/completions over a scripted engine."""

import pytest
from server.events import chunks
from server.fakes import FakeService, Site, refused, spell

from anabranch.engine.messages import Update
from anabranch.server.protocol import MAX_CHOICES


def test_a_plain_answer():
    site = Site()
    document = site.complete(max_tokens=5).json()
    assert document["object"] == "text_completion"
    assert document["model"] == "tiny-k3"
    assert document["choices"] == [{"index": 0, "text": "ok", "logprobs": None, "finish_reason": "stop"}]
    assert document["usage"]["total_tokens"] == 9
    assert site.service.prompts == [list(b"hi")]
    assert site.service.params[0].max_tokens == 5


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [b"hi"]),
        (["a", "b"], [b"a", b"b"]),
        ([104, 105], [b"hi"]),
        ([[104], [105, 106]], [b"h", b"ij"]),
    ],
)
def test_all_forms_of_a_prompt(prompt, expected):
    site = Site()
    document = site.complete(prompt=prompt, n=2).json()
    assert site.service.prompts == [list(p) for p in expected for _ in range(2)]
    assert [c["index"] for c in document["choices"]] == list(range(2 * len(expected)))
    # every prompt counts once, every answer counts
    assert (document["usage"]["prompt_tokens"], document["usage"]["completion_tokens"]) == (
        7 * len(expected),
        4 * len(expected),
    )


@pytest.mark.parametrize("prompt", [[], None, 3, {"a": 1}, [1, "a"], [[1], "a"], [True], [[1.5]], [1.0], [None]])
def test_no_form_of_a_prompt(prompt):
    refused(Site().complete(prompt=prompt), 400, "prompt: need a string, a list of strings", param="prompt")


def test_sampling_fields_reach_the_engine():
    given = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "min_p": 0.1,
        "presence_penalty": 1.0,
        "frequency_penalty": -1.0,
        "repetition_penalty": 1.1,
        "ignore_eos": True,
        "min_tokens": 2,
    }
    site = Site()
    more = {"stop": ["x", "yz"], "stop_token_ids": [3], "logit_bias": {"5": -100, "6": 1}, "seed": 11, "n": 2}
    assert site.complete(**given, **more, logprobs=4, skip_special_tokens=False).status_code == 200
    first, second = site.service.params
    assert {name: getattr(first, name) for name in given} == given
    assert (first.stop, first.stop_token_ids, first.logit_bias) == (("x", "yz"), (3,), {5: -100, 6: 1})
    assert (first.seed, second.seed, first.logprobs, first.prompt_logprobs) == (11, 12, 4, None)
    assert site.service.skip_special == [False, False]


def test_null_fields_are_absent_fields():
    site = Site()
    nulls = dict.fromkeys(("temperature", "top_p", "seed", "stop", "n", "logprobs", "logit_bias", "stream", "suffix"))
    assert site.complete(**nulls, max_tokens=None).status_code == 200
    assert (site.service.params[0].temperature, site.service.params[0].max_tokens) == (1.0, 16)


@pytest.mark.parametrize(
    ("field", "value", "accepted"),
    [
        ("temperature", -1, "0 (greedy) or a positive number"),
        ("temperature", "hot", "number"),
        ("top_p", 0, "0 < top_p <= 1"),
        ("top_p", 1.5, "0 < top_p <= 1"),
        ("top_k", -2, "or a positive number"),
        ("min_p", 2, "0 <= min_p <= 1"),
        ("presence_penalty", 3, "-2..2"),
        ("repetition_penalty", 0, "0.01..100"),
        ("logprobs", 21, "0..20"),
        ("min_tokens", 99, "max_tokens"),
        ("n", 0, "greater than or equal to 1"),
        ("n", MAX_CHOICES + 1, "less than or equal to 128"),
        ("n", True, "integer"),
        ("seed", 2**64, "less than"),
        ("stop", [""], "non-empty"),
        ("logit_bias", {"a": 1}, "token id"),
        ("logit_bias", {"1": 101}, "-100..100"),
        ("max_tokens", 10**30, "less than"),
    ],
)
def test_a_value_out_of_range_names_its_field(field, value, accepted):
    error = refused(Site().complete(**{field: value}), 400, field, accepted, param=field)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"suffix": "x"}, "suffix is not supported"),
        ({"best_of": 3}, "best_of=3 is not supported"),
        ({"max_tokens": 0}, "needs echo=true"),
        ({"stream_options": {"include_usage": True}}, "stream_options needs stream=true"),
        ({"max_tokens": 3000}, "exceeds the context"),
        ({"prompt": ""}, "the prompt has no tokens"),
    ],
)
def test_what_is_refused(body, words):
    response = Site().complete(**body)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


def _echo_script(text: str, prompt: str):
    prompt_logprobs = [(None, {})] + [(-1.0, {token: -1.0, 0: -2.0}) for token in prompt.encode()[1:]]
    first, *rest = spell(*text, reason="length") if text else [Update(finish_reason="length", prompt_tokens=7)]
    return [first._replace(prompt_logprobs=prompt_logprobs), *rest]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs(stream):
    site = Site(FakeService(script=_echo_script("é!", "hi")))
    response = site.complete(echo=True, logprobs=1, stream=stream)
    if stream:
        parts = [c["choices"][0] for c in chunks(response.content)]
        text = "".join(p["text"] for p in parts)
        found = {name: [v for p in parts for v in p["logprobs"][name]] for name in parts[0]["logprobs"]}
    else:
        choice = response.json()["choices"][0]
        text, found = choice["text"], choice["logprobs"]
    assert site.service.params[0].prompt_logprobs == 1
    assert text == "hié!"
    assert found["tokens"] == ["h", "i", "bytes:\\xc3", "bytes:\\xa9", "!"]
    assert found["token_logprobs"] == [None, -1.0, -0.5, -0.5, -0.5]
    assert found["text_offset"] == [0, 1, 2, 2, 3]
    # minus infinity has no place in JSON
    assert found["top_logprobs"] == [
        None,
        {"\0": -2.0, "i": -1.0},
        {"\0": -9999.0, "bytes:\\xc3": -0.5},
        {"\0": -9999.0, "bytes:\\xa9": -0.5},
        {"\0": -9999.0, "!": -0.5},
    ]


def test_scoring_a_prompt_alone():
    site = Site(FakeService(script=_echo_script("", "hi")))
    choice = site.complete(prompt=[104, 105], echo=True, logprobs=0, max_tokens=0).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("hi", [None, -1.0])
    assert site.service.params[0].max_tokens == 0


def test_echo_alone_asks_for_no_logprobs():
    site = Site()
    choice = site.complete(echo=True).json()["choices"][0]
    assert (choice["text"], choice["logprobs"]) == ("hiok", None)
    assert site.service.params[0].prompt_logprobs is None
    # with nothing to generate either, the prompt is still checked by the engine
    assert site.complete(echo=True, max_tokens=0).status_code == 200
    assert site.service.params[1].prompt_logprobs == 0


@pytest.mark.parametrize("stream", [False, True])
def test_token_ids_on_request(stream):
    response = Site(FakeService(script=spell("a", "b"))).complete(return_token_ids=True, stream=stream)
    parts = [c["choices"][0] for c in chunks(response.content)] if stream else response.json()["choices"]
    assert [t for p in parts for t in p["token_ids"]] == [97, 98]
    assert parts[0]["prompt_token_ids"] == list(b"hi")


def test_streams_of_several_answers_are_told_apart():
    found = chunks(Site(FakeService(script=spell("a", "b"))).complete(prompt=["x", "y"], n=2, stream=True).content)
    for index in range(4):
        mine = [c["choices"][0] for c in found if c["choices"][0]["index"] == index]
        assert "".join(p["text"] for p in mine) == "ab"
        assert mine[-1]["finish_reason"] == "stop"


def test_a_checkpoint_without_tokenizer_takes_ids():
    script = [Update(token_ids=[5], logprobs=[-1.0], top_logprobs=[{}], finish_reason="length", prompt_tokens=1)]
    site = Site(FakeService(script=script, tokenizer=False))
    choice = site.complete(prompt=[1], logprobs=0, return_token_ids=True).json()["choices"][0]
    assert (choice["token_ids"], choice["logprobs"]["tokens"]) == ([5], ["token_id:5"])
    refused(site.complete(prompt="text"), 400, "no tokenizer")
    refused(site.chat(), 400, "no tokenizer")
