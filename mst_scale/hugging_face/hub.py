"""Makes the hub's libraries work offline when the hub cannot be reached, so that they do not retry for minutes."""

from __future__ import annotations

import os
import socket


def offline_unless_reachable() -> str | None:
    """Set HF_HUB_OFFLINE, with which the libraries look into their cache at once; returns the host not reached."""
    import urllib.parse
    import urllib.request

    address = urllib.parse.urlparse(os.environ.get("HF_ENDPOINT", "https://huggingface.co"))
    if "HF_HUB_OFFLINE" in os.environ or "https" in urllib.request.getproxies():
        return None
    try:
        socket.create_connection((address.hostname or "", address.port or 443), timeout=10).close()
    except OSError:
        os.environ["HF_HUB_OFFLINE"] = "1"
        return address.hostname
    return None
