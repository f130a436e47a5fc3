"""The HTTP server: OpenAI's and Anthropic's APIs over an engine in the same process. Needs the `server` extra."""

from deepinfer.http.app import http_app
from deepinfer.http.config import HttpConfig

__all__ = ["HttpConfig", "http_app"]
