"""A hosted API as a process of its own: reads what comes, keeps nothing, and answers each path at once.

python -m tests.chaos.upstream_process     prints its port
"""

from __future__ import annotations

import asyncio

from aiohttp import web

from tests.fakes.upstream import CHAT, CONTENT, EMBEDDINGS, MESSAGE, RESPONSE

ANSWERS = {"/responses": RESPONSE, "/embeddings": EMBEDDINGS, "/messages": MESSAGE, ":generateContent": CONTENT}


async def answer(http: web.Request) -> web.Response:
    async for _ in http.content.iter_any():
        pass
    told = next((told for end, told in ANSWERS.items() if http.path.endswith(end)), CHAT)
    return web.Response(body=b"".join(told.pieces), content_type=told.media)


async def main() -> None:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(runner.addresses[0][1], flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
