"""/metrics of the controller, on loopback: what turnout.observe.run_metrics counts.

Promises: scraping it costs the run the rendering only; the port is free again when the block ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from turnout.core.errors import ConfigError, Fault
from turnout.observe.exposition import CONTENT_TYPE

HOST = "127.0.0.1"


@contextlib.asynccontextmanager
async def metrics_served(port: int, text: Callable[[], str]) -> AsyncIterator[str]:
    """The URL, while the block runs; port 0: any that is free. Raises ConfigError where the port is taken."""

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=text().encode(), headers={"Content-Type": CONTENT_TYPE})

    app = web.Application()
    app.add_routes([web.get("/metrics", metrics)])
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        site = web.TCPSite(runner, HOST, port)
        try:
            await site.start()
        except OSError as fault:
            reason = f"can't be listened on: {fault.strerror or fault}"
            raise ConfigError(Fault("--metrics-port", str(port), reason, "give another port, or 0")) from None
        yield f"http://{HOST}:{runner.addresses[0][1]}/metrics"
    finally:
        await runner.cleanup()
