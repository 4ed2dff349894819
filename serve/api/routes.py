"""The routes besides the completions: models, health, metrics and the chat page."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from outrider.serve.api.dependencies import EngineDep, ModelName
from outrider.serve.api.errors import unknown_model
from outrider.serve.api.page import page

router = APIRouter()


async def _model(engine: EngineDep, name: ModelName) -> dict[str, Any]:
    """Return OpenAI's description of the model, with vLLM's and Outrider's additional fields."""
    outrider = engine.outrider
    manifest = outrider.manifest
    return {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "max_model_len": outrider.build.capacity,
        "draft_models": [manifest.models[role].source for role in manifest.roles[1:]],
    }


ModelDep = Annotated[dict[str, Any], Depends(_model)]


@router.get("/v1/models", response_model=None)
async def models(model: ModelDep) -> Response:
    """List the server's only model."""
    return JSONResponse({"object": "list", "data": [model]})


@router.get("/v1/models/{name:path}", response_model=None)
async def one_model(name: str, model: ModelDep) -> Response:
    """Return the model with a name."""
    if name != model["id"]:
        raise unknown_model(name, model["id"])
    return JSONResponse(model)


@router.head("/health", response_model=None, include_in_schema=False)
@router.get("/health", response_model=None)
async def health(engine: EngineDep) -> Response:
    """Report whether the bundle is loaded and its engines work."""
    engine.check()
    load = engine.scheduler.load
    return JSONResponse({"status": "ok", "running": load.running})


@router.get("/metrics", response_model=None)
async def metrics(engine: EngineDep) -> Response:
    """Return the metrics in Prometheus' format."""
    return Response(engine.metrics.text(), media_type=CONTENT_TYPE_LATEST)


@router.head("/", response_model=None, include_in_schema=False)
@router.get("/", response_model=None, include_in_schema=False)
async def chat_page() -> Response:
    """Return the chat page."""
    return page()
