"""What stands between HTTP and the engine's thread: who may ask, who waits, and which text goes to whom."""

from __future__ import annotations

import asyncio
import itertools
import logging
import math
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from ftk.errors import UserError
from ftk.serving.encoded import ended_by, num_prompt_tokens
from ftk.serving.metrics import Metrics
from ftk.serving.refusal import FAILURE, Refusal, request_id
from ftk.serving.worker import Failed, Loaded, Order, Report, Step, Worker
from ftk.version import __version__

if TYPE_CHECKING:
    from ftk.generation.results import EncodedText, TextPiece
    from ftk.generation.text import TextGenerator
    from ftk.serving.config import ServeConfig

R = TypeVar("R")
Inbox: TypeAlias = "asyncio.Queue[tuple[int, TextPiece | Exception]]"

_RELOADING = threading.Lock()  # several models are loaded again one after the other
_LONGEST_RETRY = 60  # seconds; OpenAI's client takes longer ones for nonsense

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Asked:
    """A prompt that is being answered; its times are by `time.monotonic`, None before.

    Attributes:
        place: among the prompts of its request.
        inbox: of its request: (place, piece or error).
        began: when it came.
        entered: when it got a row.
        first: when the step that read it had ended, and with it written a first token.
        newest: when its newest piece came.
    """

    place: int
    inbox: Inbox
    began: float
    entered: float | None = None
    first: float | None = None
    newest: float | None = None


class Service:
    """Prompts in, pieces of text out, for all requests of one event loop, once its `worker` is started.

    Args:
        config: options.
        name: the name of the model for clients; each adapter has its own name.
        open_generator: loads the model, in the engine's thread.
        share: gives the orders of this rank to the others; None: there are no others.

    Attributes:
        names: of the model, and of the model with each adapter.
        generator: once the model is loaded.
        draining: whether new requests are refused while the running ones end.
        failure: what ended the engine's thread.
        ended: set when the thread has ended.
    """

    def __init__(
        self,
        config: ServeConfig,
        name: str,
        open_generator: Callable[[], TextGenerator[Any]],
        share: Callable[[list[Order]], object] | None = None,
    ) -> None:
        self.config, self.name = config, name
        self.names = (name, *config.adapter_folders())
        self.created = int(time.time())
        self.metrics = Metrics()
        self.generator: TextGenerator[Any] | None = None
        self.draining = False
        self.failure: BaseException | None = None
        self.loaded, self.ended = asyncio.Event(), asyncio.Event()
        self.loop = asyncio.get_running_loop()
        self._tickets = itertools.count()
        self._asked: dict[int, Asked] = {}
        self.inboxes: dict[str, Inbox] = {}  # by the request's id
        self._row_seconds = 0.0  # that an answer takes, of the newest ones
        self._called: dict[asyncio.Future[Any], int] = {}  # -> calls of its request that are left
        self._is_reloading = False
        self.worker = Worker(
            open_generator,
            config.max_context,
            lambda reports: self._on_loop(self._deliver, reports),
            lambda generator: self._on_loop(self._ready, generator),
            lambda error: self._on_loop(self._end, error),
            share,
            self._watch,
        )

    @property
    def num_asked(self) -> int:
        """Prompts and calls that wait or are being answered."""
        return len(self._asked) + sum(self._called.values())

    @property
    def num_ahead(self) -> int | None:
        """Prompts that wait in front of the next one; None where a row is free."""
        waiting = self.num_asked - self.admit().config.batch_size
        return waiting if waiting >= 0 else None

    def is_full(self) -> bool:
        """Whether the next prompt would be refused."""
        return (
            self.generator is not None and self.num_asked >= self.config.max_waiting + self.generator.config.batch_size
        )

    def not_ready(self) -> str | None:
        """Why the service takes no prompts now; None where it does."""
        if self.failure is not None:
            return "the model has failed"
        if self.draining:
            return "the service is ending"
        return "the model is being loaded" if self.generator is None else None

    def not_alive(self) -> str | None:
        """Why the service should be started again; None where it works, waits, loads or ends."""
        if self.failure is not None:
            return "the model has failed"
        began = self.worker.step_began
        seconds = 0.0 if began is None else time.monotonic() - began
        return f"the model has been in one step for {seconds:.0f} s" if seconds > self.config.stall_timeout else None

    def adapter_of(self, model: str | None) -> str | None:
        """The adapter that a model of this name has."""
        return None if model in (None, self.name) else model

    def reload(self) -> None:
        """Loads the model once more beside the one that answers, which it follows if it is sound.

        Prompts that are being answered or wait are answered by the model that took them. If the new one cannot be
        loaded, has another tokenizer or cannot answer, the old one stays; the log says which.
        """
        if self._is_reloading or self.not_ready() is not None:
            logger.warning("%s: not loaded again: %s", self.name, self.not_ready() or "a reload is already running")
            return
        if self.worker.share is not None:
            logger.warning("not loaded again: several processes share the model; start another service")
            return
        self._is_reloading = True
        threading.Thread(target=self._reload, args=(self.admit(),), name="reload", daemon=True).start()

    def _reload(self, old: TextGenerator[Any]) -> None:
        """In a thread of its own."""
        try:
            with _RELOADING:
                loaded = Loaded.by(self.worker.open_generator, self.config.max_context)
            if loaded.generator.tokenizer.fingerprint != old.tokenizer.fingerprint:
                raise UserError("it has another tokenizer; start another service for it")
            if type(loaded.generator) is not type(old):
                raise UserError("it was trained for another task; start another service for it")
        except BaseException as error:  # whatever it is, there is a model that works
            self._on_loop(self._reloaded, error)
        else:
            self.worker.replace(loaded, lambda: self._on_loop(self._reloaded, None))

    def _reloaded(self, error: BaseException | None) -> None:
        self._is_reloading = False
        if error is None:
            logger.info("%s: loaded again: new prompts are answered by the new model", self.name)
        else:
            trace = None if isinstance(error, UserError) else error
            logger.error("%s: not loaded again, the old model answers: %s", self.name, error, exc_info=trace)

    def abandon(self) -> None:
        """Refuses all that waits or is being answered: a status, or an event at the end of a stream."""
        self._refuse_all(Refusal(503, "the service has ended"))

    def _refuse_all(self, error: Refusal) -> None:
        for asked in self._asked.values():
            asked.inbox.put_nowait((asked.place, error))
        for future in self._called:
            _settle(future, None, error)

    def admit(self) -> TextGenerator[Any]:
        """What answers prompts.

        Raises:
            Refusal: 503 while the model is loaded or the service ends.
        """
        reason = self.not_ready()
        if reason is not None or self.generator is None:
            close = {"connection": "close"} if self.draining else {}
            raise Refusal(503, f"{reason}; try again", code="not_ready", headers={"retry-after": "5", **close})
        return self.generator

    def check_room(self, count: int) -> None:
        """Raises Refusal where `count` further prompts would be too many: 429, or 400 if they always are."""
        most = self.config.max_waiting + self.admit().config.batch_size
        if count > most:
            raise Refusal(400, f"{count} answers in a request; ask for at most {most}")
        if self.num_asked + count > most:
            raise Refusal(
                429,
                f"{self.num_asked} prompts are waiting or being answered; try again",
                code="queue_full",
                headers={"retry-after": str(self._retry_after())},
            )

    def _retry_after(self) -> int:
        """Seconds in which what waits is answered, if it is like the newest prompts."""
        rows = self.admit().config.batch_size
        return min(max(1, math.ceil((self.num_asked - rows) / rows * self._row_seconds)), _LONGEST_RETRY)

    def cancel(self, identity: str) -> None:
        """Ends the answers to a request, by its id. Raises Refusal, 404, where none is being answered that has it."""
        if identity not in self.inboxes:
            raise Refusal(404, f"no request {identity!r:.80} is being answered")
        self.inboxes[identity].put_nowait((0, Refusal(499, "the request was cancelled", code="cancelled")))

    async def answer(self, prompts: Sequence[EncodedText]) -> AsyncGenerator[tuple[int, TextPiece], None]:
        """Answers the prompts of one request: gives (place, piece) as pieces come. Closing it drops the prompts.

        Raises:
            Refusal: too many prompts wait; a prompt that the engine does not take, or that fails; the request takes
                too long.
        """
        generator = self.admit()
        self.check_room(len(prompts))
        read: set[int] = set()  # places of prompts that the model has read
        inbox: Inbox = asyncio.Queue()
        own: list[int] = []
        reason = "client_left"
        began, open_prompts, longest = time.monotonic(), len(prompts), self.config.request_timeout
        late = Refusal(504, f"no whole answer in {longest:g} seconds")
        # One timer a request: `asyncio.wait_for` makes a task and a timer for each token.
        timer = self.loop.call_later(longest, inbox.put_nowait, (0, late))
        self.inboxes[request_id.get()] = inbox
        try:
            for place, prompt in enumerate(prompts):
                ticket = next(self._tickets)
                own.append(ticket)
                self._asked[ticket] = Asked(place, inbox, began)
                self.worker.submit(ticket, prompt)
            self._count()
            while open_prompts:
                place, found = await inbox.get()
                if isinstance(found, Exception):  # which ends the other prompts of this request, too
                    is_cancelled = isinstance(found, Refusal) and found.code == "cancelled"
                    reason = "timeout" if found is late else "cancelled" if is_cancelled else "error"
                if isinstance(found, UserError):
                    raise Refusal(400, str(found))
                if isinstance(found, Failed):
                    logger.error("request %s: the model could not answer", request_id.get(), exc_info=found.__cause__)
                    raise Refusal(500, FAILURE)
                if isinstance(found, Exception):
                    raise found
                if found.result is not None:
                    why = await ended_by(generator, prompts[place], found.result.answers)
                    self.metrics.finished.labels(why).inc()
                    open_prompts -= 1
                if place not in read:
                    read.add(place)
                    self.metrics.prompt_tokens.inc(num_prompt_tokens(generator, prompts[place]))
                yield place, found
        finally:
            timer.cancel()
            self.inboxes.pop(request_id.get(), None)
            for ticket in [ticket for ticket in own if self._asked.pop(ticket, None) is not None]:
                self.worker.cancel(ticket)
            if open_prompts:
                self.metrics.finished.labels(reason).inc(open_prompts)
            self._count()

    async def call(self, *calls: tuple[Callable[[], R], Order]) -> list[R]:
        """The values of functions that use the model; the engine's thread takes a step between any two of them.

        Args:
            calls: (scores, the same for other ranks, see `Worker.call`), each as long as a step may last.

        Raises:
            Refusal: too many prompts wait; 400 for a user's mistake; it takes too long.
        """

        async def in_turn() -> list[R]:
            self.check_room(len(calls))
            return [await self._call(*call, len(calls) - number) for number, call in enumerate(calls)]

        try:
            return await asyncio.wait_for(in_turn(), self.config.request_timeout)
        except UserError as error:
            raise Refusal(400, str(error)) from None
        except asyncio.TimeoutError:
            raise Refusal(504, f"no whole answer in {self.config.request_timeout:g} seconds") from None

    async def _call(self, function: Callable[[], R], score: Order, num_left: int) -> R:
        future: asyncio.Future[R] = self.loop.create_future()
        self._called[future] = num_left

        def run() -> None:
            try:
                self._on_loop(_settle, future, function(), None)
            except Exception as error:
                self._on_loop(_settle, future, None, error)

        self.worker.call(run, score, lambda: not future.done())  # done: its client has left
        try:
            return await future
        finally:
            del self._called[future]

    def _on_loop(self, function: Callable[..., object], *arguments: Any) -> None:
        if not self.loop.is_closed():
            self.loop.call_soon_threadsafe(function, *arguments)

    def _ready(self, generator: TextGenerator[Any]) -> None:
        self.generator = generator
        self.metrics.info.info({"version": __version__, "model": self.name, "fingerprint": generator.digest})
        self.loaded.set()

    def _end(self, error: BaseException | None) -> None:
        self.failure = error
        self._is_reloading = False  # a generator that has come too late is not taken
        self.loaded.set()
        self.ended.set()
        if error is None:
            self.abandon()
        else:
            self._refuse_all(Refusal(500, FAILURE))

    def _deliver(self, reports: Sequence[Report]) -> None:
        now = time.monotonic()
        for ticket, piece, error, num_dropped in reports:
            self.metrics.generation_tokens.inc(num_dropped if piece is None else len(piece.tokens))
            asked = self._asked.get(ticket)
            if asked is None:  # its client has left
                continue
            if piece is not None:
                before = asked.newest or asked.first or now
                num_steps = len(piece.token_logprobs) - (asked.newest is None)
                if num_steps > 0 and now > before:  # else it came with the one before
                    self.metrics.between_tokens.observe((now - before) / num_steps)
                asked.newest = now
                asked.inbox.put_nowait((asked.place, piece))
                if piece.result is not None:
                    self.metrics.whole.observe(now - asked.began)
                    self.metrics.decoding.observe(now - (asked.first or now))
                    seconds = now - (asked.entered or asked.began)
                    self._row_seconds += ((seconds - self._row_seconds) / 8) if self._row_seconds else seconds
                    del self._asked[ticket]
            if error is not None:
                asked.inbox.put_nowait((asked.place, error))
                del self._asked[ticket]
        self._count()

    def _watch(self, step: Step) -> None:
        """In the engine's thread."""
        self.metrics.step.observe(step.seconds)
        self.metrics.step_rows.observe(step.num_rows)
        for asked in filter(None, map(self._asked.get, step.entered)):
            asked.entered, asked.first = step.began, step.began + step.seconds
            self.metrics.first_token.observe(asked.first - asked.began)
            self.metrics.queued.observe(step.began - asked.began)
            self.metrics.reading.observe(step.seconds)

    def _count(self) -> None:
        rows = 1 if self.generator is None else self.generator.config.batch_size
        running = min(self.num_asked, rows)
        self.metrics.running.set(running)
        self.metrics.waiting.set(self.num_asked - running)
        self.metrics.usage.set(running / rows)


def _settle(future: asyncio.Future[Any], value: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(value)
    else:
        future.set_exception(error)
