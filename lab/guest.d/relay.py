#!/usr/bin/python3
"""Listens on 127.0.0.1 and forwards each connection to the same port of another address, byte by byte:
relay.py ADDRESS PORT... It prints a line once it listens."""

import asyncio
import sys


async def copy(reader, writer):
    """Forwards all data, until the end or an error of either side."""
    try:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    except OSError:
        pass
    finally:
        writer.close()


async def main(address, *ports):
    for port in map(int, ports):
        async def connected(reader, writer, port=port):
            try:
                far_reader, far_writer = await asyncio.open_connection(address, port)
            except OSError:
                writer.close()
                return
            await asyncio.gather(copy(reader, far_writer), copy(far_reader, writer))

        await asyncio.start_server(connected, "127.0.0.1", port)
    print("listening", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
