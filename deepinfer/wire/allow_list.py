"""AllowList: which clients a server with CURVE keys admits. pyzmq's authenticator asks it.

Knows nothing of what is sent.
"""

from __future__ import annotations

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from deepinfer.wire.keys import ZAP_DOMAIN, ServerKeys


class AllowList:
    """Admits the clients of `keys` to the sockets of `context`, while it is open. Needs a running loop."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._clients = keys.clients
        self._authenticator = AsyncioAuthenticator(context)
        self._authenticator.configure_curve_callback(ZAP_DOMAIN, self)
        self._authenticator.start()

    def callback(self, domain: str, key: bytes) -> bool:
        """Asked by the authenticator, with the key as Z85 text."""
        return domain == ZAP_DOMAIN and key in self._clients

    def close(self) -> None:
        self._authenticator.stop()
