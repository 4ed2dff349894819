"""The dependencies that routes get from their application."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Request

from outrider.serve.engine import EngineThread
from outrider.serve.settings import Settings


async def _engine(request: Request) -> EngineThread:
    engine: EngineThread = request.app.state.engine
    return engine


async def _settings(request: Request) -> Settings:
    settings: Settings = request.app.state.settings
    return settings


EngineDep = Annotated[EngineThread, Depends(_engine)]
SettingsDep = Annotated[Settings, Depends(_settings)]


async def _model_name(engine: EngineDep, settings: SettingsDep) -> str:
    """Return the name of the model in the API; raises `NotReadyError` while the bundle is loading."""
    outrider = engine.outrider
    models = outrider.manifest.models
    return settings.model or models["target"].source.rstrip("/").rsplit("/", 1)[-1]


ModelName = Annotated[str, Depends(_model_name)]
