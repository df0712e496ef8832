"""A TCP proxy with the bandwidth of the network of a small machine, and the latency of a bucket.

    bandwidth_proxy.py 127.0.0.1:5000 --gbit 0.75 --delay-ms 30

The first line of output is the port. All responses share the bandwidth; requests are not limited.
Each part of a request arrives after the delay.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress

GBIT_BYTES = 1e9 / 8
_CHUNK_BYTES = 256 * 1024
_SLEEP_TOLERANCE_S = 0.02
"""Idle time up to this is made up for, because `asyncio.sleep` returns late."""

Wait = Callable[[int], Awaitable[None]]


class BandwidthLimit:
    """Computes when bytes have passed a link of the given bandwidth."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def finished_at(self, size_bytes: int, now: float) -> float:
        """Return when these bytes have passed, after all earlier ones."""
        self._free_at = (
            max(self._free_at, now - _SLEEP_TOLERANCE_S) + size_bytes / self._bytes_per_s
        )
        return self._free_at


async def serve(
    host: str, port: int, limit: BandwidthLimit, *, delay_s: float = 0.0
) -> asyncio.Server:
    """Start a proxy to that server on a free port."""
    clock = asyncio.get_running_loop().time

    async def throttle(size_bytes: int) -> None:
        await asyncio.sleep(max(0.0, limit.finished_at(size_bytes, clock()) - clock()))

    async def delay(_size_bytes: int) -> None:
        await asyncio.sleep(delay_s)

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, port)
        await asyncio.gather(
            _forward(reader, server_writer, delay), _forward(server_reader, writer, throttle)
        )

    return await asyncio.start_server(connected, "127.0.0.1", 0)


async def _forward(source: asyncio.StreamReader, sink: asyncio.StreamWriter, wait: Wait) -> None:
    """Forward bytes until one side closes the connection."""
    with closing(sink), suppress(ConnectionError):  # workers are killed
        while body := await source.read(_CHUNK_BYTES):
            await wait(len(body))
            sink.write(body)
            await sink.drain()


async def _main(host: str, port: int, bytes_per_s: float, delay_s: float) -> None:
    server = await serve(host, port, BandwidthLimit(bytes_per_s), delay_s=delay_s)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="host:port")
    parser.add_argument("--gbit", type=float, default=1e3, help="a second")
    parser.add_argument("--delay-ms", type=float, default=0.0)
    args = parser.parse_args()
    host, _, port = args.server.rpartition(":")
    asyncio.run(_main(host, int(port), args.gbit * GBIT_BYTES, args.delay_ms / 1000))
