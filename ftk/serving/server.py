"""Runs the service: listens, loads model and keys again at SIGHUP, and after SIGTERM ends what runs before itself."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import uvicorn
from starlette.middleware.cors import CORSMiddleware

from ftk.errors import UserError, naming_place
from ftk.serving.app import routes
from ftk.serving.connection import Connection, request_log
from ftk.serving.guard import MOST_HEADER_BYTES, OPEN_ROUTES, Guard, allowed_hosts

if TYPE_CHECKING:
    from ftk.serving.config import ServeConfig
    from ftk.serving.service import Service

logger = logging.getLogger(__name__)

_MOST_FILES = 65536  # each connection is one
_FEW_FILES = 4096
_POLL = 0.02  # seconds
_LAST_STEP = 5.0  # seconds
_FIRST = asyncio.FIRST_COMPLETED
_HANG_UP = getattr(signal, "SIGHUP", None)  # not on Windows


class _Server(uvicorn.Server):
    """A server whose signals are handled by its caller."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def serve(
    config: ServeConfig,
    models: Sequence[Callable[[], Service]],
    read_keys: Callable[[], Collection[str]],
    tell: Callable[[str], object],
) -> bool:
    """Serves until a signal ends it; returns once all accepted requests are answered, or their time is over.

    Args:
        config: options.
        models: make the service of each model, in the event loop. They are loaded one after the other; meanwhile the
            service answers that it is not ready.
        read_keys: gives the keys, one of which requests must carry, at the start and at SIGHUP; none: requests need
            none.
        tell: called with a line for the user: the address once prompts can come, that a signal ends the service, and
            that it has ended.

    Returns:
        whether the engines' threads have ended, too; else the process must end without waiting for them.

    Raises:
        UserError: the address is taken or none of this machine's.
        Exception: of a model that cannot be loaded; of one that failed later, at the end.
    """
    _allow_files()
    listener = _listen(config)
    try:
        has_ended = asyncio.run(_serve(config, models, read_keys, tell, listener))
    finally:
        listener.close()
    tell("ended")
    return has_ended


def _allow_files() -> None:
    """As many open files, and with them connections, as the system allows."""
    try:
        import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, _MOST_FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    if most < _FEW_FILES:
        logger.warning("%d files may be open, and no more connections than that; ulimit -Hn raises it", most)


def _listen(config: ServeConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.host, config.port))
    except OSError as error:
        listener.close()
        raise UserError(
            f"cannot listen at {config.host} port {config.port}: {error.strerror or error}; choose another `port` or "
            "`host`"
        ) from None
    listener.listen(2048)
    return listener


async def _serve(
    config: ServeConfig,
    models: Sequence[Callable[[], Service]],
    read_keys: Callable[[], Collection[str]],
    tell: Callable[[str], object],
    listener: socket.socket,
) -> bool:
    _set_up_log()
    keys = read_keys()
    services = [make() for make in models]
    guard = _guard(config, services, keys)
    server = _http_server(config, guard)
    stopping = asyncio.Event()
    loop = asyncio.get_running_loop()

    def stop(signum: signal.Signals) -> None:
        if stopping.is_set():
            tell(f"{signum.name}: ending at once")
            for service in services:
                service.abandon()
            server.should_exit = True
        else:
            tell(f"{signum.name}: answering what was accepted, then ending; at most {config.drain_timeout:g} seconds")
        for service in services:
            service.draining = True
        stopping.set()

    def reload() -> None:
        try:
            guard.keys = read_keys()
        except UserError as error:
            logger.error("the keys are those of before: %s", error)
        for service in services:
            service.reload()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, stop, signum)
    if _HANG_UP is not None:
        loop.add_signal_handler(_HANG_UP, _HangUp(reload, partial(stop, _HANG_UP)))
    serving = asyncio.ensure_future(server.serve([listener]))
    host, port = listener.getsockname()[:2]
    address = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    working = asyncio.ensure_future(_work(services, lambda names: tell(f"{names} at {address}")))
    try:
        await asyncio.wait([serving, asyncio.ensure_future(stopping.wait()), working], return_when=_FIRST)
        working.cancel()
        await _drain(services, server, config.drain_timeout)
    finally:
        server.should_exit = True
        for service in services:
            service.worker.stop()
        await serving
    has_ended = await _threads_end(services)
    for service in services:
        if service.failure is not None:
            with naming_place(service.name) if len(services) > 1 else contextlib.nullcontext():
                raise service.failure
    return has_ended


def _guard(config: ServeConfig, services: Sequence[Service], keys: Collection[str]) -> Guard:
    app = routes(*services)
    return Guard(
        app,
        services[0].metrics,
        allowed_hosts(config.host, config.allowed_hosts),
        keys,
        config.max_body,
        config.read_timeout,
        known_routes=[route.path for route in app.routes if hasattr(route, "path")],
        open_routes=(*OPEN_ROUTES, "/metrics") if config.metrics_public else OPEN_ROUTES,
        origins=config.cors_origins,
    )


def _http_server(config: ServeConfig, guard: Guard) -> _Server:
    outside = CORSMiddleware(
        guard,
        config.cors_origins,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],  # clients send some of their own
        expose_headers=["x-request-id", "retry-after"],
    )
    connection = partial(Connection, read_timeout=config.read_timeout, write_timeout=config.write_timeout)
    return _Server(
        uvicorn.Config(
            outside if config.cors_origins else guard,  # type: ignore[arg-type]
            # The same whichever packages are installed: not httptools, uvloop, websockets where they happen to be.
            http=connection,  # type: ignore[arg-type]
            loop="asyncio",
            ws="none",
            proxy_headers=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            h11_max_incomplete_event_size=MOST_HEADER_BYTES,
            timeout_keep_alive=math.ceil(config.read_timeout),
            timeout_graceful_shutdown=1,
        )
    )


async def _work(services: Sequence[Service], tell: Callable[[str], object]) -> None:
    """Loads the models, and waits until one cannot be loaded, or none answers any more."""
    for service in services:  # one after the other: each finds the memory that those before it have left
        service.worker.start()
        await service.loaded.wait()
        if service.not_ready() is not None:
            return
    # What is loaded lives on: looking through it for cycles stops all threads for 0.1 s, as thousands of requests make
    # the collector do. A model that gives way to one loaded again is freed without it.
    gc.collect()
    gc.freeze()
    tell(f"{', '.join(service.name for service in services)} {'answers' if len(services) == 1 else 'answer'}")

    async def ended(service: Service) -> None:
        await service.ended.wait()
        if service.failure is not None and len(services) > 1:
            logger.error("%s has failed; the other models answer", service.name, exc_info=service.failure)

    await asyncio.gather(*map(ended, services))


async def _threads_end(services: Sequence[Service]) -> bool:
    """Waits for the engines' threads; False where one still loads a model or takes a step."""
    started = [service.ended.wait() for service in services if service.worker.ident is not None]
    try:
        await asyncio.wait_for(asyncio.gather(*started), _LAST_STEP)
    except asyncio.TimeoutError:  # the interpreter must not end under it
        return False
    return True


class _HangUp:
    """SIGHUP: asks for model and keys to be loaded again, unless the terminal has been closed, which ends the service.

    Args:
        reload, stop: what is done.
    """

    def __init__(self, reload: Callable[[], None], stop: Callable[[], None]) -> None:
        is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN  # as under nohup
        self.reload, self.close = reload, (lambda: None) if is_ignored else stop
        self.has_terminal = _has_terminal()

    def __call__(self) -> None:
        had_terminal, self.has_terminal = self.has_terminal, _has_terminal()
        (self.close if had_terminal and not self.has_terminal else self.reload)()


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _set_up_log() -> None:
    """A request's line is JSON alone; of uvicorn only errors: what a client does wrong has a line of its own."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    request_log.handlers, request_log.propagate = [handler], False
    logging.getLogger("uvicorn").setLevel(logging.ERROR)


async def _drain(services: Sequence[Service], server: uvicorn.Server, seconds: float) -> None:
    """Waits until what was accepted is answered and sent."""
    for service in services:
        service.draining = True
    ends = asyncio.get_running_loop().time() + seconds
    await asyncio.sleep(_POLL)  # what came with the signal is not read yet
    while any(service.failure is None for service in services) and not server.should_exit:
        num_asked = sum(service.num_asked for service in services)
        if not (num_asked or _is_sending(server)):
            return
        if asyncio.get_running_loop().time() > ends:
            logger.warning("%d prompts were not answered within %g seconds", num_asked, seconds)
            for service in services:
                service.abandon()
            return
        await asyncio.sleep(_POLL)


def _is_sending(server: uvicorn.Server) -> bool:
    state = server.server_state
    return bool(state.tasks) or any(service.transport.get_write_buffer_size() for service in state.connections)
