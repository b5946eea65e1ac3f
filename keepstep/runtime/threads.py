"""A call that may hang, awaited by an asyncio loop."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_thread(call: Callable[[], T], name: str) -> T:
    """Awaits a call that may wait for storage, or hang: in a thread that holds up neither the loop nor the end of the process."""
    loop = asyncio.get_running_loop()
    result: asyncio.Future[T] = loop.create_future()

    def deliver(tell: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(lambda: None if result.done() else tell())

    def run() -> None:
        try:
            value = call()
        except Exception as error:  # noqa: BLE001  (top of a thread: who awaits it gets the error)
            deliver(lambda error=error: result.set_exception(error))  # type: ignore[misc]  # of an unbound name
        else:
            deliver(lambda: result.set_result(value))

    threading.Thread(target=run, name=name, daemon=True).start()
    return await result
