"""Who may speak to the server, how much and how often. What comes in is hostile until it has passed here.

A web page anywhere can send requests to a server on localhost, and with DNS rebinding can even read the answers. So the
name that was asked for must be one of ours, and what a browser sends must come from our own page.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
MOST_CLIENTS = 1024
HEADERS = {
    "content-security-policy": "default-src 'self'; img-src 'self' blob: data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), microphone=(), geolocation=()",
    "cache-control": "no-store",
}


@dataclass(frozen=True)
class Limits:
    """What the server accepts."""

    upload_bytes: int = 16 << 20
    """Of an image file."""
    body_bytes: int = 1 << 20
    """Of anything else."""
    per_second: float = 120.0
    """Requests of one client, on average;"""
    burst: int = 300
    """and at once."""
    seconds_to_send: float = 20.0
    """In which a body has to arrive."""
    waiting: int = 32
    """Requests that may wait for their turn."""


@dataclass(frozen=True)
class Hosts:
    """The names that the server answers to.

    Args:
        names: of hosts, without ports.
        any_address: whether any address in numbers will do. DNS rebinding needs a name.

    >>> Hosts().allow("localhost:8000"), Hosts().allow("evil.example:8000")
    (True, False)
    """

    names: Collection[str] = LOOPBACK
    any_address: bool = False

    @classmethod
    def listening_on(cls, address: str, more: Collection[str] = ()) -> Hosts:
        """Those of a server that listens on an address, and more that the user names."""
        names = LOOPBACK | {address.lower()} | {name.lower() for name in more}
        return cls(names, any_address=address.lower() not in LOOPBACK)

    def allow(self, header: str) -> bool:
        """Whether a Host header names us."""
        try:
            parts = urlsplit(f"//{header}")
            name, _ = parts.hostname, parts.port
        except ValueError:
            return False
        if name is None or parts.netloc != header or "@" in header:
            return False
        return name.lower() in self.names or (self.any_address and _is_address(name))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Rate:
    """A bucket of tokens for each client, of whom only the latest are remembered."""

    def __init__(self, per_second: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_second = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # tokens left, and when

    def admit(self, client: str) -> bool:
        """Whether this client may send a request now."""
        now = self._clock()
        tokens, then = self._buckets.pop(client, (float(self._burst), now))
        tokens = min(self._burst, tokens + (now - then) * self._per_second)
        admitted = tokens >= 1
        self._buckets[client] = (tokens - 1 if admitted else tokens, now)
        while len(self._buckets) > MOST_CLIENTS:
            self._buckets.popitem(last=False)
        return admitted


class Guard:
    """ASGI middleware that checks each request before the application sees it, and adds headers to each answer."""

    def __init__(self, app: ASGIApp, *, hosts: Hosts, limits: Limits, upload_path: str) -> None:
        self._app = app
        self._hosts = hosts
        self._limits = limits
        self._upload_path = upload_path
        self._rate = Rate(limits.per_second, limits.burst)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        try:
            self._check_sender(scope)
            body = await self._whole_body(scope, receive)
        except HTTPException as refusal:
            answer = JSONResponse({"error": refusal.detail}, refusal.status_code, {"connection": "close"})
            await answer(scope, receive, send_with_headers)
            return
        try:
            await self._app(scope, _replay(body, receive), send_with_headers)
        except Exception as error:  # a mistake of ours: the details stay here
            logging.getLogger("torchcaps").error("A request failed", exc_info=error)
            if not started:
                answer = JSONResponse({"error": "Something went wrong here that should not."}, 500)
                await answer(scope, receive, send_with_headers)

    def _check_sender(self, scope: Scope) -> None:
        hosts, origins, sites = map(Headers(scope=scope).getlist, ("host", "origin", "sec-fetch-site"))
        if len(hosts) != 1 or not self._hosts.allow(hosts[0]):
            raise HTTPException(421, "This server does not answer to that host name. Allow it with --allow-host.")
        if any(origin not in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins):
            raise HTTPException(403, "Requests from other web sites are refused.")
        from_elsewhere = any(site not in ("same-origin", "none") for site in sites)
        if from_elsewhere and scope["path"].startswith("/api/"):
            raise HTTPException(403, "Requests from other web sites are refused.")
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise HTTPException(405, "Only GET, HEAD and POST are understood.")
        client = scope.get("client")
        if not self._rate.admit(client[0] if client else ""):
            raise HTTPException(429, "Too many requests: wait a second.")

    async def _whole_body(self, scope: Scope, receive: Receive) -> bytes:
        most = self._limits.upload_bytes if scope["path"] == self._upload_path else self._limits.body_bytes
        if scope["method"] != "POST":
            most = 0
        too_large = HTTPException(413, f"That is too large: the limit is {most / 2**20:.3g} MB.")
        for length in Headers(scope=scope).getlist("content-length"):
            if not length.isdecimal() or int(length[:20]) > most:
                raise too_large
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.seconds_to_send):
                async for part in Request(scope, receive).stream():
                    body += part
                    if len(body) > most:
                        raise too_large
        except ClientDisconnect:
            raise HTTPException(400, "The request was cut off.") from None
        except TimeoutError:
            raise HTTPException(408, "The request took too long to arrive.") from None
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A body that has been received already, and then whatever follows."""
    pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return pending.pop() if pending else await receive()

    return replayed
