"""The chat page, and its content security policy."""

from __future__ import annotations

import base64
import functools
import hashlib
from importlib.resources import files

from fastapi.responses import HTMLResponse


@functools.cache
def page() -> HTMLResponse:
    """Return the page. Its policy allows it only to run its own script and to call its own server."""
    text = files("outrider.serve.api").joinpath("page.html").read_text(encoding="utf-8")
    script, style = (text.split(f"<{tag}>")[1].split(f"</{tag}>")[0] for tag in ("script", "style"))
    allowed = [
        "default-src 'none'",
        f"script-src {_digest(script)}",
        f"style-src {_digest(style)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    ]
    headers = {"Content-Security-Policy": "; ".join(allowed), "X-Content-Type-Options": "nosniff"}
    return HTMLResponse(text, headers=headers)


def _digest(text: str) -> str:
    """Return the hash of a script or style, as a content security policy names it."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
