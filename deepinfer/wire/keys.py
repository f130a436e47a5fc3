"""CURVE keys: who a server is, which clients it admits, and what a client needs. Files are those of pyzmq and czmq.

Knows nothing of what is sent.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NamedTuple

import zmq
import zmq.auth

from deepinfer.errors import ConfigError

ZAP_DOMAIN: Final = "deepinfer"
KEY_CHARACTERS: Final = 40


class KeyPair(NamedTuple):
    """Z85 text, 40 characters each."""

    public: bytes
    secret: bytes


class ServerKeys(NamedTuple):
    """A server's own keys, and the public keys of the clients that it admits."""

    own: KeyPair
    clients: frozenset[bytes]


def write_keys(folder: Path, name: str) -> tuple[Path, Path]:
    """Files of a new key pair: the public one, to be given away, and the secret one, of mode 0600.

    Raises `ConfigError` where either is there already, and for a name that is a path.
    """
    if Path(name).name != name or name in ("", ".."):
        raise ConfigError("keygen", f"{name!r}: a name is expected, --dir says where the files go")
    for suffix in (".key", ".key_secret"):
        if (folder / f"{name}{suffix}").exists():
            raise ConfigError("keygen", f"{folder / name}{suffix} is there already")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as unseen:  # of mode 0700: nobody reads the secret before it is 0600
        made = [Path(path) for path in zmq.auth.create_certificates(unseen, name)]
        made[1].chmod(0o600)
        public, secret = (path.rename(folder / path.name) for path in made)
    return public, secret


def read_pair(path: str | os.PathLike[str]) -> KeyPair:
    """The keys in a secret file. Raises `ConfigError`."""
    public, secret = _load(path)
    if secret is None:
        raise ConfigError("key", f"{os.fspath(path)} holds no secret key: give the file that ends in .key_secret")
    return KeyPair(public, secret)


def read_public(path: str | os.PathLike[str]) -> bytes:
    """The public key in either file. Raises `ConfigError`."""
    return _load(path)[0]


def read_clients(folder: str | os.PathLike[str]) -> frozenset[bytes]:
    """The public keys of the `.key` files of a folder. Raises `ConfigError` where there are none."""
    keys = frozenset(read_public(path) for path in sorted(Path(folder).glob("*.key")))
    if not keys:
        raise ConfigError("clients", f"{os.fspath(folder)} holds no .key file: nobody could connect")
    return keys


def _load(path: str | os.PathLike[str]) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError) as error:
        raise ConfigError("key", f"{os.fspath(path)}: {error}") from None
    for key in (public, secret):
        if key is not None and len(key) != KEY_CHARACTERS:
            raise ConfigError(
                "key", f"{os.fspath(path)}: a key of {len(key)} characters, {KEY_CHARACTERS} are expected"
            )
    return public, secret


def server_options(keys: ServerKeys) -> Mapping[int, int | bytes]:
    """Socket options of a server with CURVE."""
    return {
        zmq.CURVE_SERVER: 1,
        zmq.CURVE_SECRETKEY: keys.own.secret,
        zmq.CURVE_PUBLICKEY: keys.own.public,
        zmq.ZAP_DOMAIN: ZAP_DOMAIN.encode(),
    }


def client_options(own: KeyPair, server: bytes) -> Mapping[int, int | bytes]:
    """Socket options of a client with CURVE. `server` is the server's public key."""
    return {zmq.CURVE_SERVERKEY: server, zmq.CURVE_PUBLICKEY: own.public, zmq.CURVE_SECRETKEY: own.secret}
