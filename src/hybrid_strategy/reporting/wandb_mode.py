"""Whether W&B is spoken to now or later: told by the environment, without importing wandb or Lightning."""

from __future__ import annotations

import netrc
import os

_API_HOST = "api.wandb.ai"


def resolve_mode(mode: str) -> str:
    """`auto` made definite: what `WANDB_MODE` says, else online where there is a key, else offline."""
    if mode != "auto":
        return mode
    named = {"dryrun": "offline", "run": "online"}.get(os.environ.get("WANDB_MODE", ""), os.environ.get("WANDB_MODE", ""))
    if named in ("online", "offline", "disabled"):
        return named
    return "online" if os.environ.get("WANDB_API_KEY") or _has_stored_key() else "offline"


def _has_stored_key() -> bool:
    """Has `wandb login` left a key on this machine?"""
    host = os.environ.get("WANDB_BASE_URL", f"https://{_API_HOST}").partition("://")[2].split("/")[0].split(":")[0]
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
