"""The routes besides the completions: models, health, metrics and the chat page."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST

from outrider.serve.dependencies import EngineDep, ModelName
from outrider.serve.page import page

router = APIRouter()


@router.get("/v1/models", response_model=None)
async def models(engine: EngineDep, name: ModelName) -> Response:
    """List the one model."""
    outrider = engine.outrider
    manifest = outrider.manifest
    model = {
        "id": name,
        "object": "model",
        "created": 0,
        "owned_by": "outrider",
        "max_model_len": outrider.build.capacity,
        "draft_models": [manifest.models[role].source for role in manifest.roles[1:]],
    }
    return JSONResponse({"object": "list", "data": [model]})


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


@router.get("/", response_model=None, include_in_schema=False)
async def chat_page() -> Response:
    """Return the chat page."""
    return page()
