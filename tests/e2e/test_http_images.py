"""Images over HTTP: refused by name, and nobody is asked for one, whatever its address is."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from deepinfer import Engine
from deepinfer_workers.models.deepseek.random_tokenizer import write_tokenizer
from doubles.serving import Served, serving

VOCAB_SIZE: Final = 300
ADDRESSES: Final = (
    "http://127.0.0.1:{port}/x.png",
    "http://localhost:{port}/x.png",
    "http://0.0.0.0:{port}/x.png",
    "http://2130706433:{port}/x.png",
    "http://0x7f.1:{port}/x.png",
    "http://[::1]:{port}/x.png",
    "http://[::ffff:127.0.0.1]:{port}/x.png",
    "http://user:password@127.0.0.1:{port}/x.png",
    "HTTP://127.0.0.1:{port}",
)
ELSEWHERE: Final = (
    "http://169.254.169.254/latest/meta-data/",
    "http://10.0.0.1/x.png",
    "http://192.168.0.1/x.png",
    "https://example.org/x.png",
    "file:///etc/passwd",
    "gopher://127.0.0.1/x",
    "ftp://127.0.0.1/x",
    "//127.0.0.1/x.png",
    "data:image/png;base64,AAAA",
    "data:text/html,x",
    "data:image/svg+xml;base64,PHN2Zy8+",
    "",
    "x" * 10_000,
)


@pytest.fixture
def listeners() -> Iterator[list[socket.socket]]:
    """Of both kinds of address, on one port; they would hear whoever comes."""
    with ExitStack() as stack:
        first = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        found = [first]
        if socket.has_ipv6:
            try:
                address = ("::1", first.getsockname()[1])
                found.append(stack.enter_context(socket.create_server(address, family=socket.AF_INET6)))
            except OSError:
                pass  # this machine has no such address
        for listener in found:
            listener.setblocking(False)
        yield found


@pytest.fixture(params=["deepseek_v41", "deepseek_v4", "template"])
async def served(
    request: pytest.FixtureRequest, tmp_path: Path, word_model: str, no_tasks_left: None
) -> AsyncIterator[Served]:
    """Models of every kind: only the newest could have an image in its prompt."""
    size = 97
    if request.param == "template":
        (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages[0].content }}"}')
    else:
        size = VOCAB_SIZE
        write_tokenizer(tmp_path, size)
        (tmp_path / "config.json").write_text(f'{{"model_type": "{request.param}", "eos_token_id": 1}}')
    async with Engine("fake", tokenizer=str(tmp_path), fake_vocab_size=size) as engine, serving(engine) as served:
        yield served


def bodies(url: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """An image at `url`, as each API has it."""
    off = {"type": "disabled"}
    part: dict[str, Any] = {"type": "image_url", "image_url": {"url": url}}
    talk = [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]
    yield "/v1/chat/completions", {"messages": talk, "thinking": off, "max_tokens": 4}
    part = {"type": "input_image", "image_url": url}
    talk = [{"role": "user", "content": [{"type": "input_text", "text": "?"}, part]}]
    yield "/v1/responses", {"input": talk, "reasoning": {"effort": "none"}, "max_output_tokens": 4}
    part = {"type": "image", "source": {"type": "url", "url": url}}
    talk = [{"role": "user", "content": [{"type": "text", "text": "?"}, part]}]
    yield "/v1/messages", {"messages": talk, "thinking": off, "max_tokens": 4}
    yield "/v1/messages/count_tokens", {"messages": talk, "thinking": off}
    yield "/tokenize", {"messages": talk}


async def test_no_image_is_fetched(
    served: Served, listeners: list[socket.socket], request: pytest.FixtureRequest
) -> None:
    port = listeners[0].getsockname()[1]
    is_newest = request.node.callspec.params["served"] == "deepseek_v41"
    for url in (*(address.format(port=port) for address in ADDRESSES), *ELSEWHERE):
        for path, body in bodies(url):
            reply = await served.post(path, {"model": "fake", **body})
            if is_newest:
                assert reply.status == 400, (path, url)
                if url.startswith("http"):
                    assert reply.json()["error"]["message"] == "unsupported: image" or path == "/tokenize"
            else:  # the older model gets a remark in its place
                assert reply.status in (200, 400), (path, url)
    for listener in listeners:
        with pytest.raises(BlockingIOError):
            listener.accept()
