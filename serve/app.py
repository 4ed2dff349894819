"""The server's application: its routes, middleware and error handlers over one engine thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from outrider import __version__
from outrider.errors import OutriderError
from outrider.serve.api import chat, completions, responses, routes, tokenize
from outrider.serve.api.errors import on_bug, on_http_error, on_invalid_body, on_library_error
from outrider.serve.engine import EngineThread
from outrider.serve.network.guard import Guard
from outrider.serve.settings import Settings


def create_app(settings: Settings, engine: EngineThread) -> FastAPI:
    """Return the application. Its lifespan starts and stops the engine thread."""
    app = FastAPI(
        title="Outrider",
        version=__version__,
        lifespan=_lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would go to the host that the request names
    )
    app.state.settings, app.state.engine = settings, engine
    app.add_middleware(Guard, settings=settings, metrics=engine.metrics)
    app.add_exception_handler(OutriderError, on_library_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_bug)
    app.add_exception_handler(RequestValidationError, on_invalid_body)
    for module in (completions, chat, responses, tokenize, routes):
        app.include_router(module.router)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    engine: EngineThread = app.state.engine
    engine.start()
    yield
    await asyncio.to_thread(engine.stop)
