"""A TCP proxy whose connections can be cut or held up, on a thread of its own. Knows nothing of what passes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from types import TracebackType
from typing import Any, Self, TypeVar

T = TypeVar("T")


class Proxy:
    """Between a client and a server on loopback."""

    def __init__(self, port: int) -> None:
        """`port`: the server's."""
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_open = True
        self._passes = asyncio.Event()
        self._passes.set()
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        self._server = self._call(self._listen())
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def cut(self) -> None:
        """End every connection at once; further ones end as soon as they are made."""
        self._call(self._cut())

    def hold(self) -> None:
        """Nothing passes any more, in either direction; no connection ends."""
        self._loop.call_soon_threadsafe(self._passes.clear)

    def mend(self) -> None:
        self._is_open = True
        self._loop.call_soon_threadsafe(self._passes.set)

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10.0)

    async def _listen(self) -> asyncio.Server:
        return await asyncio.start_server(self._pass, "127.0.0.1", 0)

    async def _close(self) -> None:
        self._server.close()
        self._passes.set()
        await self._cut()

    async def _cut(self) -> None:
        self._is_open = False
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_open:
            writer.transport.abort()
            return
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        pair = {writer, far_writer}
        self._writers |= pair
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._copy(source, sink, pair))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _copy(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, pair: set[asyncio.StreamWriter]
    ) -> None:
        try:
            while data := await source.read(65_536):
                await self._passes.wait()
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        finally:
            for writer in pair:
                writer.transport.abort()
