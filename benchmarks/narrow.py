"""A proxy with limited bandwidth: what a machine of that bandwidth receives from a bucket.

    narrow.py 127.0.0.1:5000 --gbit 0.75

Its first line of output is its port. All responses together are limited to the bandwidth; requests
are not.
"""

import argparse
import asyncio
from collections.abc import Awaitable, Callable
from contextlib import closing, suppress

GBIT_BYTES = 1e9 / 8
_AT_ONCE_BYTES = 256 * 1024
_SLACK_S = 0.02
"""For so long a wire that stood still may be made up for: who sleeps, sleeps too long."""

Wait = Callable[[int], Awaitable[None]]


class Meter:
    """When bytes are through a wire of that width."""

    def __init__(self, bytes_per_s: float) -> None:
        self._bytes_per_s = bytes_per_s
        self._free_at = float("-inf")

    def through_at(self, size_bytes: int, now: float) -> float:
        """All that came before goes first."""
        self._free_at = max(self._free_at, now - _SLACK_S) + size_bytes / self._bytes_per_s
        return self._free_at


async def serve(host: str, port: int, meter: Meter) -> asyncio.Server:
    """A wire to that server, on a port of its own."""
    clock = asyncio.get_running_loop().time

    async def narrow(size_bytes: int) -> None:
        await asyncio.sleep(max(0.0, meter.through_at(size_bytes, clock()) - clock()))

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection(host, port)
        await asyncio.gather(_carry(reader, to_there, _at_once), _carry(there, writer, narrow))

    return await asyncio.start_server(connected, "127.0.0.1", 0)


async def _at_once(_size_bytes: int) -> None:
    return


async def _carry(source: asyncio.StreamReader, sink: asyncio.StreamWriter, wait: Wait) -> None:
    """Until one of both has gone."""
    with closing(sink), suppress(ConnectionError):  # workers are killed
        while body := await source.read(_AT_ONCE_BYTES):
            await wait(len(body))
            sink.write(body)
            await sink.drain()


async def _main(host: str, port: int, bytes_per_s: float) -> None:
    server = await serve(host, port, Meter(bytes_per_s))
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("server", help="host:port")
    parser.add_argument("--gbit", type=float, required=True, help="a second")
    asked = parser.parse_args()
    host, _, port = asked.server.rpartition(":")
    asyncio.run(_main(host, int(port), asked.gbit * GBIT_BYTES))
