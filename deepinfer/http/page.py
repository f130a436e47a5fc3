"""The page at `/`: a prompt box, live tokens and a few figures, from files that come with the package.

The files say nothing of the model and ask for no key; what they fetch does. Their headers allow them to load and to
call nothing but this server, and no text to become markup. Knows nothing of requests.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response

from deepinfer.engine import Engine

PAGE_FILES: Final = {"/": "page.html", "/page.css": "page.css", "/page.js": "page.js"}
"""Path to file."""
_TYPES: Final = {"html": "text/html", "css": "text/css", "js": "text/javascript"}
_HEADERS: Final = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; base-uri 'none'; "
        "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "cache-control": "no-cache",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_endpoints() -> dict[str, Callable[[Request], Awaitable[Response]]]:
    """One a file, by its path."""
    return {path: _serving(name) for path, name in PAGE_FILES.items()}


def _serving(name: str) -> Callable[[Request], Awaitable[Response]]:
    body = files("deepinfer.http").joinpath("static", name).read_bytes()
    media_type = _TYPES[name.rpartition(".")[2]]

    async def answer(request: Request) -> Response:
        return Response(body, headers=_HEADERS, media_type=media_type)

    return answer


def figures(engine: Engine) -> dict[str, Any]:
    """What the page shows of an engine that is open. Counters are since its start: differences of two make rates.

    A forward is that of one sample in one step; it commits a token of the model's own, and the drafts that it accepted.
    Forwards are counted where the model drafts.
    """
    stats, metrics = engine.stats(), engine.metrics()
    scheduler, drafts = stats.scheduler, stats.core.drafts
    return {
        "num_running": scheduler.num_running,
        "num_waiting": scheduler.num_waiting,
        "kv_cache_usage": scheduler.num_blocks_used / scheduler.num_blocks,
        "prompt_tokens": metrics["prompt_tokens"].value,
        "prompt_tokens_cached": metrics["prompt_tokens_cached"].value,
        "generation_tokens": metrics["generation_tokens"].value,
        "decode_forwards": drafts.num_steps,
        "decode_tokens": drafts.num_tokens,
    }
