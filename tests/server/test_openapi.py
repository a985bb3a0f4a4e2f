"""Generated requests against the document that the server publishes."""

from contextlib import asynccontextmanager

import hypothesis
import schemathesis
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from server.fakes import FakeService, Site

SITE = Site(FakeService("k3"))


@asynccontextmanager
async def _always_on(_):
    """Each generated request would start and end the server."""
    yield


SITE.app.router.lifespan_context = _always_on
schema = schemathesis.openapi.from_asgi("/openapi.json", SITE.app)


def test_every_route_is_published():
    paths = SITE.ask("GET", "/openapi.json").json()["paths"]
    expected = "/v1/completions /v1/chat/completions /v1/models /tokenize /detokenize /health /metrics /version "
    expected += "/server_info /get_server_info /model_info /get_model_info /v1/loads /flush_cache /start_profile "
    expected += "/update_weights_from_disk"
    assert set(f"{expected} /stop_profile".split()) == set(paths)


@schema.include(path_regex="completions|tokenize").parametrize()
@hypothesis.settings(max_examples=25, derandomize=True, deadline=None, database=None)
def test_generated_requests_break_nothing(case):
    response = case.call_and_validate(
        checks=[not_a_server_error, content_type_conformance, response_schema_conformance]
    )
    assert response.status_code in (200, 400, 404, 405, 413, 429)
    if response.status_code != 200:
        assert response.json()["error"]["message"]
