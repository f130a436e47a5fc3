"""Files of keys: what is none, and what would not be where it is said to be, is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer import ConfigError
from deepinfer.wire.keys import read_clients, read_pair, read_public, write_keys


def test_a_pair_is_read_as_it_was_written(tmp_path: Path) -> None:
    public, secret = write_keys(tmp_path / "keys", "server")
    pair = read_pair(secret)
    assert read_public(public) == pair.public != pair.secret and read_clients(tmp_path / "keys") == {pair.public}
    assert secret.stat().st_mode & 0o777 == 0o600


def test_nothing_is_overwritten_and_no_name_is_a_path(tmp_path: Path) -> None:
    _, secret = write_keys(tmp_path, "server")
    before = secret.read_text()
    for name in ("server", "../" + tmp_path.name + "/server", "/tmp/server", "x/../server", "", ".."):
        with pytest.raises(ConfigError, match="keygen"):
            write_keys(tmp_path, name)
    assert secret.read_text() == before and len(list(tmp_path.iterdir())) == 2


def test_a_key_that_was_cut_is_named(tmp_path: Path) -> None:
    public, secret = write_keys(tmp_path, "server")
    for path in (public, secret):
        path.write_text(path.read_text().rstrip()[:-9] + '"\n')
        with pytest.raises(ConfigError, match=r"characters, 40 are expected"):
            read_public(path)
