"""Routes beside generation: health, metrics, what is served, tokens, cache and profiles."""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from prometheus_client import CONTENT_TYPE_LATEST

from anabranch import __version__
from anabranch.server.desk import Desk, Weights
from anabranch.server.errors import ApiError, refusing
from anabranch.server.info import loads_document, model_document, server_document
from anabranch.server.logprobs import token_text
from anabranch.server.protocol import DetokenizeRequest, TokenizeRequest, UpdateWeightsRequest
from anabranch.server.requests import JsonRoute


def status_routes(desk: Desk) -> APIRouter:
    """What monitoring and routers ask for; the get_ names are SGLang's older ones."""
    routes = APIRouter()

    @routes.get("/health", response_class=Response)
    async def health() -> Response:
        """200 while requests are accepted, else 503."""
        desk.check_health()
        return Response()

    @routes.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus metrics."""
        load = await _expert_load(desk)
        return Response(desk.metrics.text(load.get("expert_load")), media_type=CONTENT_TYPE_LATEST)

    @routes.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @routes.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one model that is served."""
        model = {"id": desk.model_name, "object": "model", "created": desk.created, "owned_by": "anabranch"}
        return {"object": "list", "data": [model | {"root": str(desk.facts.path), "max_model_len": desk.max_len}]}

    @routes.get("/v1/loads")
    async def loads() -> dict[str, Any]:
        return loads_document(desk)

    @routes.get("/model_info")
    @routes.get("/get_model_info")
    async def model_info() -> dict[str, Any]:
        return model_document(desk)

    @routes.get("/server_info")
    @routes.get("/get_server_info")
    async def server_info() -> dict[str, Any]:
        """Configuration, fusions and operations with the reason of each choice, bytes and counters."""
        return server_document(desk) | await _expert_load(desk)

    return routes


async def _expert_load(desk: Desk) -> dict[str, Any]:
    """What the experts were given so far, where that is counted."""
    if not desk.facts.document.get("counts_experts") or not desk.service.accepting:
        return {}
    return {"expert_load": await desk.service.expert_load()}


def token_routes(desk: Desk) -> APIRouter:
    """Text to tokens and back."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        """Token ids of a text or of a rendered conversation."""
        desk.check_model(body.model)
        if body.messages is None:
            ids = await desk.encode(body.prompt or "")
        else:
            options = {"tools": body.tools or None, "add_generation_prompt": body.add_generation_prompt}
            ids = await desk.render(body.messages, **options)
        document = {"tokens": ids, "count": len(ids), "max_model_len": desk.max_len}
        if body.return_token_strs:
            document["token_strs"] = [token_text(desk.tokenizer, token) for token in ids]
        return document

    @routes.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, str]:
        """Text of token ids."""
        desk.check_model(body.model)
        with refusing():
            return {"prompt": desk.need_tokenizer().decode(body.tokens, skip_special=body.skip_special_tokens)}

    return routes


def control_routes(desk: Desk) -> APIRouter:
    """What an operator may tell the engine."""
    routes = APIRouter(route_class=JsonRoute)

    @routes.post("/flush_cache")
    async def flush_cache() -> dict[str, bool]:
        """Forget cached prefixes; `flushed` is false if there is no prefix cache."""
        return {"flushed": await desk.service.flush_cache()}

    @routes.post("/update_weights_from_disk")
    async def update_weights_from_disk(body: UpdateWeightsRequest) -> dict[str, Any]:
        """Replace the weights with those of a checkpoint directory on the server's disk; what runs ends first."""
        with refusing():
            written, paused = await desk.service.update_weights(Path(body.model_path), abort=body.abort_all_requests)
        desk.weights = Weights(body.model_path, body.weight_version or desk.weights.version, desk.weights.updates + 1)
        return {"success": True, "message": f"{written} weights written", "num_paused_requests": paused}

    @routes.post("/start_profile")
    async def start_profile() -> dict[str, str]:
        """Record the coming steps with torch.profiler."""
        directory = _profile_dir(desk)
        with refusing():
            await desk.service.start_profile(directory)
        return {"directory": str(directory)}

    @routes.post("/stop_profile")
    async def stop_profile() -> dict[str, str]:
        """Write the recorded steps as a Chrome trace."""
        directory = _profile_dir(desk)
        with refusing():
            return {"path": str(await desk.service.stop_profile(directory))}

    return routes


def _profile_dir(desk: Desk) -> Path:
    if desk.settings.profile_dir is None:
        raise ApiError(400, "the server was started without --profile-dir")
    return desk.settings.profile_dir
