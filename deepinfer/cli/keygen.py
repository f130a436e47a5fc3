"""`deepinfer keygen`: keys for a server beyond loopback, and for its clients."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer.cli.common import in_words, say
from deepinfer.wire.keys import write_keys


def keygen(
    name: Annotated[str, typer.Argument(help="Of the files: NAME.key and NAME.key_secret.")],
    folder: Annotated[Path, typer.Option("--dir", help="Where they go.")] = Path(),
) -> None:
    """Make a key pair: one for the server, one for every client.

    The public file of a client goes into the folder that `serve --clients` names, that of the server to its clients.
    """
    with in_words("keygen"):
        public, secret = write_keys(folder, name)
        print(public)
        print(secret)
        say(f"{secret.name} is secret: it stays where it is used")
