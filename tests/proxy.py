"""A TCP proxy between a client and its server that cuts or disturbs connections when a test says so."""

import asyncio
import contextlib
import threading


class Proxy:
    """Forwards a port of its own to ``target``. ``fault`` is None, or

    close     accept connections, and close them
    flip      change a bit of every piece
    silent    swallow all bytes
    answers   let requests through, and cut the connection instead of the answer
    """

    def __init__(self, target):
        self.target, self.fault, self.damaged = target, None, 0
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()
        assert self._ready.wait(10)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        with contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self):
        self._main = asyncio.current_task()
        self._open = set()
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            server.close()
            for task in list(self._open):
                task.cancel()
            await asyncio.gather(*self._open, return_exceptions=True)

    async def _connected(self, reader, writer):
        self._open.add(asyncio.current_task())
        writers = [writer]
        try:
            if self.fault == "close":
                self.damaged += 1
                return
            inner_reader, inner_writer = await asyncio.open_connection(*self.target)
            writers.append(inner_writer)
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, inner_writer, answers=False))
                group.create_task(self._pump(inner_reader, writer, answers=True))
        except (OSError, ExceptionGroup, asyncio.CancelledError):
            pass
        finally:
            self._open.discard(asyncio.current_task())
            for each in writers:
                each.transport.abort()

    async def _pump(self, reader, writer, *, answers):
        pieces = 0  # the first two of a server are the handshake and the tickets of TLS 1.3
        while piece := await reader.read(2**16):
            pieces += 1
            if answers and self.fault == "answers" and pieces > 2:
                self.damaged += 1
                raise ConnectionError
            if self.fault == "close":
                self.damaged += 1
                raise ConnectionError
            if self.fault == "silent":
                self.damaged += 1
                continue
            if self.fault == "flip":
                self.damaged += 1
                piece = piece[:-1] + bytes([piece[-1] ^ 1])
            writer.write(piece)
            await writer.drain()
        raise ConnectionError

    def stop(self):
        self._loop.call_soon_threadsafe(self._main.cancel)
        self._thread.join()
