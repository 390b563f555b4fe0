"""An asyncio loop in a thread of its own, for the servers and the client of the control plane."""

import asyncio
import logging
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from checkmate.config import CheckmateError

_T = TypeVar("_T")
_log = logging.getLogger("checkmate.loop")


class LoopThread:
    """Starts at once and runs until ``close``, which cancels what still runs."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run in the background; an error that ends it is logged."""
        asyncio.run_coroutine_threadsafe(work, self._loop).add_done_callback(_log_error)

    def call(self, work: Coroutine[Any, Any, _T], timeout_s: float = 5.0) -> _T:
        """Run, wait and return the result; raises what it raises, CheckmateError after ``timeout_s``."""
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            raise CheckmateError(f"{self._thread.name}: not done within {timeout_s:g} s") from None

    def close(self) -> None:
        """Cancel everything and end the thread; can be called again."""
        if self._thread.is_alive():
            self.call(_cancel_others())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(timeout=5)
            self._loop.close()


def _log_error(done: Future[Any]) -> None:
    if not done.cancelled() and done.exception() is not None:
        _log.error("unexpected end", exc_info=done.exception())


async def _cancel_others() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
