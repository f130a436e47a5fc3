"""Where a server may listen, and what a URL of one is. Nothing is opened here.

`ipc://` needs a folder that only its owner may enter; `tcp://` beyond loopback needs keys.
"""

from __future__ import annotations

import os
import re
import stat
from pathlib import Path
from typing import Final

from deepinfer.errors import ConfigError
from deepinfer.loopback import is_loopback
from deepinfer.runtime_dir import MAX_SOCKET_PATH_BYTES

_TCP: Final = re.compile(r"tcp://(?P<host>\[[0-9a-fA-F:.]+\]|[A-Za-z0-9.-]+):(?P<port>\d{1,5}|\*)")


def check_listen(url: str, *, has_keys: bool) -> None:
    """Raises `ConfigError` for what must not be listened on."""
    if url.startswith("ipc://"):
        _check_ipc(Path(url.removeprefix("ipc://")))
    elif (found := _TCP.fullmatch(url)) is None:
        raise ConfigError("listen", f"{url!r}: ipc:///folder/name or tcp://host:port is expected")
    elif not has_keys and not is_loopback(found["host"]):
        raise ConfigError("listen", f"{url}: beyond loopback only with keys: make some by `deepinfer keygen`")


def check_connect(url: str) -> None:
    """Raises `ConfigError` for what is no URL of a server."""
    if not re.fullmatch(r"ipc://.+", url) and not _TCP.fullmatch(url):
        raise ConfigError("url", f"{url!r}: ipc:///folder/name or tcp://host:port is expected")


def _check_ipc(path: Path) -> None:
    if not path.is_absolute():
        raise ConfigError("listen", f"{path}: a path from the root is expected")
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise ConfigError("listen", f"{path}: at most {MAX_SOCKET_PATH_BYTES} bytes are possible")
    try:
        folder = path.parent.stat()
    except OSError as error:
        raise ConfigError("listen", f"{path.parent}: {error.strerror}") from None
    if folder.st_uid != os.getuid() or stat.S_IMODE(folder.st_mode) & 0o077:
        raise ConfigError("listen", f"{path.parent}: its owner alone may enter (chmod 700)")
    if os.path.lexists(path) and not stat.S_ISSOCK(path.lstat().st_mode):  # to listen there would delete it
        raise ConfigError("listen", f"{path}: it is there, and is no socket")
