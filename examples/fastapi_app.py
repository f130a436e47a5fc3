"""An engine inside a web app: it lives as long as the app does, and a client that leaves ends its request.

    pip install 'deepinfer-runtime[worker,server]'
    uvicorn --app-dir examples fastapi_app:app
    curl -N 'http://127.0.0.1:8000/stream?prompt=What+is+the+sea%3F'

`DEEPINFER_HF_MODEL_DIR=DIR` serves the model folder DIR instead of v41-nano, which came with the workers.

Written with Starlette, which FastAPI is made of: `FastAPI(lifespan=lifespan)` and `@app.get("/stream")` take the same
two functions as they are.
"""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from deepinfer import Engine, InvalidRequest, Overloaded, SamplingParams, TokenStream


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[None]:
    async with Engine(os.environ.get("DEEPINFER_HF_MODEL_DIR") or "v41-nano") as engine:
        app.state.engine = engine
        yield


async def stream(request: Request) -> Response:
    engine: Engine = request.app.state.engine
    prompt = request.query_params.get("prompt", "")
    try:
        temperature = float(request.query_params.get("temperature", "0"))
    except ValueError:
        return JSONResponse({"error": "temperature: a number is expected", "field": "temperature"}, status_code=400)
    params = SamplingParams(max_tokens=64, temperature=temperature)
    tokens = engine.stream(messages=[{"role": "user", "content": prompt}], params=params)
    try:
        first = await anext(tokens)  # a refusal is raised at the first read: before the response has begun
    except InvalidRequest as error:
        return JSONResponse({"error": str(error), "field": error.field}, status_code=400)
    except Overloaded as error:
        headers = {"Retry-After": str(math.ceil(error.retry_after_s))}
        return JSONResponse({"error": str(error)}, status_code=503, headers=headers)
    return StreamingResponse(body(first.text, tokens), media_type="text/plain")


async def body(first: str, tokens: TokenStream) -> AsyncIterator[str]:
    async with tokens:  # ends the request when the client goes away
        yield first
        async for tok in tokens:
            yield tok.text


app = Starlette(routes=[Route("/stream", stream)], lifespan=lifespan)
