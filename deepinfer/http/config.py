"""Limits of the HTTP server, and who may use it. Knows nothing of what is served."""

from __future__ import annotations

from msgspec import Struct

from deepinfer.errors import ConfigError

MIN_KEY_CHARACTERS = 16


class HttpConfig(Struct, frozen=True, kw_only=True):
    """Settings of one server. Raises `ConfigError`, which names the setting."""

    served_names: tuple[str, ...] = ()
    """Names that requests may have for the model; the first is told. Empty: the last part of the engine's model."""
    api_keys: tuple[str, ...] = ()
    """One of them comes with every request but `/health`. Empty: nobody is asked for one."""
    hosts: tuple[str, ...] = ()
    """Without keys, names that requests may be for, beside loopback and the address that they come in at: what a proxy
    in front is called. `*`: any name, where no browser can ask."""
    max_body_bytes: int = 8 << 20
    max_buffered_bytes: int = 256 << 20
    """Bodies that are being read, all together; a request that would need more is asked to come later."""
    max_head_bytes: int = 64 << 10
    """Of the line and the headers of a request, all together; also of what a client sends ahead of its answer."""
    max_connections: int = 16_384
    max_open_requests: int = 4096
    """Requests under way; a further one is asked to come later, before its body is read."""
    head_timeout_s: float = 15.0
    """How long a client may take to say what it wants, from its connection or its first byte on."""
    body_timeout_s: float = 30.0
    """How long a client may take to send a body."""
    keep_alive_s: float = 15.0
    """After so long without an event, a stream gets a comment."""
    write_timeout_s: float = 60.0
    """How long a client may take nothing of what is sent to it."""
    queue_timeout_s: float | None = None
    """A request that has not started after so long is asked to come later."""
    timeout_s: float | None = None
    """A request that has not ended after so long fails."""
    stall_s: float = 30.0
    """`/health` is bad when a step takes longer."""

    def __post_init__(self) -> None:
        for field in (name for name in self.__struct_fields__ if name.startswith("max_")):
            if getattr(self, field) < 1:
                raise ConfigError(field, f"{getattr(self, field)}, at least 1 is expected")
        for field in (name for name in self.__struct_fields__ if name.endswith("_s")):
            value = getattr(self, field)
            if value is not None and not value > 0:
                raise ConfigError(field, f"{value}, more than 0 is expected")
        if any(len(key) < MIN_KEY_CHARACTERS or not key.isascii() for key in self.api_keys):
            raise ConfigError("api_keys", f"a key has at least {MIN_KEY_CHARACTERS} characters, all of them ASCII")
