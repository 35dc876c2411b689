"""ftk's service in Ray Serve: replicas behind one address, for those who run Ray already.

pip install 'ftk[serve]' 'ray[serve]'
serve run examples.serve.ray_serve:application path=run replicas=2
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from ray import serve

Message = MutableMapping[str, Any]


class Service:
    """The ASGI application of one replica; it is made, and the model loaded, where the replica starts.

    Args:
        path: checkpoint, run or Hugging Face folder, seen by all replicas.
        options: of generation, as for `ftk.load_generator`.
    """

    def __init__(self, path: str, **options: Any) -> None:
        self.path, self.options = path, options
        self.app: Any = None

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if self.app is None:
            self.app = await self.made()
        await self.app(scope, receive, send)

    async def made(self) -> Any:
        """The service behind its guard, once the model is loaded."""
        import ftk
        from ftk.serving.app import routes
        from ftk.serving.config import ServeConfig
        from ftk.serving.guard import Guard
        from ftk.serving.service import Service as Prompts

        config = ServeConfig()
        service = Prompts(
            config, Path(self.path).absolute().name, lambda: ftk.load_generator(self.path, **self.options)
        )
        service.worker.start()
        await service.loaded.wait()
        if service.failure is not None:
            raise service.failure
        app = routes(service)
        known = [route.path for route in app.routes if hasattr(route, "path")]
        keys = os.environ.get("FTK_API_KEY", "").split()
        return Guard(app, service.metrics, None, keys, config.max_body, config.read_timeout, known)


def application(args: dict[str, Any]) -> serve.Application:
    """What `serve run` starts: `path`, `replicas` (2), and options of generation."""
    options = dict(args)
    replicas = int(options.pop("replicas", 2))
    service = Service(**options)

    # As many requests as the service takes by itself: what is too many it answers by 429.
    @serve.deployment(name="ftk", num_replicas=replicas, max_ongoing_requests=256, graceful_shutdown_timeout_s=60)
    @serve.ingress(service)
    class Replica:
        pass

    return Replica.bind()
