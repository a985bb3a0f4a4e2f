"""Requests within the accepted ranges, or just outside, that must not end the engine for everyone else."""

import httpx
import pytest
from server.conftest import Live


@pytest.fixture(scope="module")
def live(checkpoints):
    with Live(checkpoints["k3"]) as live:
        yield live


@pytest.mark.parametrize(
    "fields",
    [
        {"stop_token_ids": [10**6], "min_tokens": 2},
        {"stop_token_ids": [-5], "min_tokens": 2},
        {"logit_bias": {"999999": 1}},
        {"temperature": 1e-45},
        {"temperature": 1e300},
        {"temperature": 1e-320},
        {"top_k": 2**31 - 1},
        {"top_p": 1e-300},
        {"repetition_penalty": 1e300},
        {"repetition_penalty": 1e-300},
        {"seed": 2**63 - 1, "n": 3},
        {"seed": -(2**63)},
        {"stop": ["a"] * 1000},
        {"stop_token_ids": list(range(272)), "min_tokens": 2},
        {"logit_bias": {str(i): -100 for i in range(272)}},
        {"presence_penalty": 2, "frequency_penalty": -2, "repetition_penalty": 5},
        {"min_p": 1.0},
        {"max_tokens": 2**31 - 1},
        {"min_tokens": 4, "ignore_eos": True, "logit_bias": {"258": 100}},
    ],
)
def test_no_request_can_break_the_engine(live, fields):
    response = httpx.post(f"{live.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 4, **fields}, timeout=20)
    assert response.status_code in (200, 400), response.text
    assert httpx.get(f"{live.url}/health").status_code == 200
    assert httpx.post(f"{live.url}/v1/completions", json={"prompt": "Hi", "max_tokens": 1}).status_code == 200
