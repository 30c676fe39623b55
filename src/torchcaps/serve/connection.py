"""Connections that are not waited for without end."""

from __future__ import annotations

from asyncio import Transport

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0  # seconds


class Impatient(H11Protocol):
    """Closes a connection on which no request has arrived for a while.

    Clients that connect and say nothing would otherwise use up all the connections that the server allows. Between
    requests the server has a limit of its own, and so has the body of a request.
    """

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.loop.call_later(PATIENCE, self._give_up)

    def _give_up(self) -> None:
        if getattr(self, "cycle", None) is None:
            self.transport.close()
