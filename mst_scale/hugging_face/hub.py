"""Keeps the hub's libraries from trying a network that is not there for half a minute."""

from __future__ import annotations

import os
import socket
import urllib.parse
import urllib.request


def offline_unless_reachable() -> str | None:
    """Without a network the hub's libraries try again for minutes; told so, they look into their cache at once. The
    name that was not reached."""
    address = urllib.parse.urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if "HF_HUB_OFFLINE" in os.environ or "https" in urllib.request.getproxies():
        return None
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=10).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return address.hostname
    return None
