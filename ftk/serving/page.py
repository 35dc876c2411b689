"""The page in which a browser asks the service; one file, without anything from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import re
from importlib.resources import files

from starlette.responses import HTMLResponse


def page() -> HTMLResponse:
    """The page, with a policy that lets no script run but its own, and no request leave for another host."""
    text = files("ftk.serving").joinpath("page.html").read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": _hash(text, "script"),
        "style-src": _hash(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    headers = {
        "content-security-policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-cache",
    }
    return HTMLResponse(text, headers=headers)


def _hash(text: str, tag: str) -> str:
    """The source of the page's one element of this name: the hash of what stands between its tags."""
    (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
