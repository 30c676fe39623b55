"""Connections that are not waited for without end."""

from __future__ import annotations

from asyncio import TimerHandle, Transport

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0  # seconds


class Impatient(H11Protocol):
    """Closes a connection on which no request has arrived for a while.

    Clients that connect and say nothing would otherwise use up all the connections that the server allows. Between
    requests the server has a limit of its own, and so has the body of a request.
    """

    _limit: TimerHandle | None = None

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._limit is None and self._is_idle():  # the beginning of another request, which ends the server's limit
            self._wait()

    def on_response_complete(self) -> None:
        if self._limit is not None:
            self._limit.cancel()
            self._limit = None
        super().on_response_complete()

    def _wait(self) -> None:
        self._limit = self.loop.call_later(PATIENCE, self._give_up)

    def _give_up(self) -> None:
        self._limit = None
        if self._is_idle():
            self.transport.close()

    def _is_idle(self) -> bool:
        """Whether no request is being answered."""
        cycle = getattr(self, "cycle", None)
        return cycle is None or cycle.response_complete
