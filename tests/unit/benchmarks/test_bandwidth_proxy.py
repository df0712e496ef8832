"""The bandwidth proxy: forwards all bytes, not faster than its limit."""

import asyncio

import pytest

from benchmarks.bandwidth_proxy import BandwidthLimit, serve


def test_concurrent_bytes_share_the_bandwidth() -> None:
    meter = BandwidthLimit(1000)
    first = meter.finished_at(500, now=10.0)
    assert meter.finished_at(500, now=10.0) == pytest.approx(first + 0.5)
    assert meter.finished_at(100, now=first + 0.3) == pytest.approx(first + 0.6)


def test_idle_time_is_not_made_up_for() -> None:
    meter = BandwidthLimit(1000)
    meter.finished_at(1, now=0.0)
    assert meter.finished_at(1000, now=100.0) == pytest.approx(101.0, abs=0.05)


def test_proxy_forwards_in_both_directions() -> None:
    async def echo_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write((await reader.readexactly(5)) * 100_000)
        writer.close()

    async def echo_through_proxy() -> bytes:
        async with await asyncio.start_server(echo_bytes, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with await serve("127.0.0.1", port, BandwidthLimit(1e9)) as proxy:
                reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
                writer.write(b"hello")
                answer = await reader.read(-1)
                writer.close()
                return answer

    assert asyncio.run(echo_through_proxy()) == b"hello" * 100_000


def test_proxy_delays_requests() -> None:
    async def echo_byte(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readexactly(1))
        writer.close()

    async def answer_time_s() -> float:
        clock = asyncio.get_running_loop().time
        async with await asyncio.start_server(echo_byte, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            limit = BandwidthLimit(1e9)
            async with await serve("127.0.0.1", port, limit, delay_s=0.05) as proxy:
                started_s = clock()
                reader, writer = await asyncio.open_connection(*proxy.sockets[0].getsockname())
                writer.write(b"a")
                assert await reader.read(-1) == b"a"
                writer.close()
                return clock() - started_s

    assert asyncio.run(answer_time_s()) >= 0.05
