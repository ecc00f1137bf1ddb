"""A server that answers later: each request is on its way for 25 ms, about as long as a bucket in the same region takes.

`with slowly(url) as slow_url:` runs it as a process of its own, so that nothing else that the benchmark does delays it
further. For requests and answers as small as the documents of a run directory.
"""

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Iterator

SECONDS = 0.025


@contextlib.contextmanager
def slowly(url: str) -> Iterator[str]:
    """The server at `url` (http://host:port), as it is reached from far away."""
    command = [sys.executable, __file__, url.removeprefix("http://")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}"
        finally:
            process.kill()


async def serve(host: str, port: int) -> None:
    """Print our own port, and pass everything on; never returns."""

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(copy(reader, far_writer, SECONDS), copy(far_reader, writer, 0.0))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay: float) -> None:
    """From one to the other until the end, each piece `delay` seconds later."""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            await asyncio.sleep(delay)
            writer.write(data)
            await writer.drain()
    writer.close()


if __name__ == "__main__":
    host, _, port = sys.argv[1].partition(":")
    asyncio.run(serve(host, int(port)))
