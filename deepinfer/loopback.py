"""Which hosts are this machine alone. Nothing is looked up."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """A name is not looked up: `localhost` is the only one that counts. IPv6 comes with brackets or without."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"
