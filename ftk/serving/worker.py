"""The thread that owns model and engine: takes prompts between two steps, and reports what they bring.

Where ranks share the model each has an engine. The first rank tells the others before every step what it has been asked
since the last one; as engines depend on nothing else, all take the same steps.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

from ftk.generation.config import checked_config
from ftk.generation.engine.making import lasting_engine
from ftk.generation.processors.guides import GuideError
from ftk.modules.evaluation_mode import evaluation_mode
from ftk.serving.encoded import order_of, ordered, with_adapter

if TYPE_CHECKING:
    from ftk.generation.engine.engine import Engine
    from ftk.generation.engine.request import Event
    from ftk.generation.results import EncodedText, TextPiece
    from ftk.generation.text import TextGenerator, TextStream

USUAL_CONTEXT = 4096
"""Places of a prompt with its answers where the model has more, or does not say how many it has."""

HEARTBEAT_SECONDS = 5.0
"""Seconds after which other ranks hear of an idle first rank: they give up one that is silent for minutes."""

REPORT_SECONDS = 0.02
"""Seconds within which new tokens of an answer are reported together, but for its first and its last ones.

Of ranks that share a model each step is reported: a text that cannot be written cancels its prompt, which all must do
in the same step.
"""

Order = Mapping[str, Any]
"""A command in the form in which other ranks get it: what JSON holds."""


class Worker(threading.Thread):
    """Answers prompts in a thread of its own until it is stopped.

    Args:
        open_generator: loads what answers; called in the thread.
        max_context: places of a prompt with its answers; None: as many as the model has positions, at most
            `USUAL_CONTEXT`.
        report: called, in the thread, with what a step has brought.
        ready: called, in the thread, with the generator, once prompts can come.
        ended: called, in the thread, with the error that ended it, or None after `stop`.
        share: called, in the thread, before each step with orders for the other ranks; None: there are no others.
        watch: called, in the thread, behind each step.

    Attributes:
        slots: places of a prompt with its answers.
        step_began: when the step that is being computed began, by `time.monotonic`; None: there is none.
    """

    def __init__(
        self,
        open_generator: Callable[[], TextGenerator[Any]],
        max_context: int | None,
        report: Callable[[Sequence[Report]], object],
        ready: Callable[[TextGenerator[Any]], object],
        ended: Callable[[BaseException | None], object],
        share: Callable[[list[Order]], object] | None = None,
        watch: Callable[[Step], object] = lambda step: None,
    ) -> None:
        super().__init__(name="engine", daemon=True)
        self.open_generator, self.max_context = open_generator, max_context
        self.report, self.ready, self.ended, self.share = report, ready, ended, share
        self.watch = watch
        self.report_seconds = REPORT_SECONDS if share is None else 0.0
        self.slots = 0
        self.step_began: float | None = None
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._loaded: list[Loaded] = []  # the last one gets new prompts; others end theirs
        self._numbers: dict[int, tuple[Loaded, int]] = {}  # ticket -> whose, number in its engine

    def submit(self, ticket: int, prompt: EncodedText) -> None:
        """Has a prompt answered; from any thread. Its reports carry the ticket."""
        self._commands.put(
            Command(
                lambda: self._submit(ticket, prompt),
                lambda: {"submit": ticket, **order_of(self._loaded[-1].generator, prompt)},
            )
        )

    def cancel(self, ticket: int) -> None:
        """Drops a prompt, if it is still being answered; from any thread."""
        self._commands.put(Command(lambda: self._cancel(ticket), lambda: {"cancel": ticket}))

    def call(self, function: Callable[[], object], score: Order, is_wanted: Callable[[], bool]) -> None:
        """Calls a function between two steps; from any thread.

        Args:
            function: scores candidates, no more than the next step may wait for, and raises nothing.
            score: what other ranks score meanwhile: the arguments of `TextGenerator.encode_candidates`, and `adapter`.
            is_wanted: whether it is still to be called, when its turn comes.
        """
        self._commands.put(Command(function, lambda: {"score": score}, is_wanted, is_long=True))

    def replace(self, loaded: Loaded, done: Callable[[], object]) -> None:
        """Has another generator answer what comes from now on; what runs is ended by its own. From any thread.

        Args:
            loaded: the other one; ranks that share a model have none.
            done: called, in the thread, when prompts go to it.
        """

        def run() -> None:
            self._adopt(loaded)
            done()

        self._commands.put(Command(run))

    def stop(self) -> None:
        """Ends the thread behind what was asked before; prompts that are not answered get no further report."""
        self._commands.put(None)

    def run(self) -> None:
        try:
            self._work()
        except BaseException as error:  # reported: the thread has nobody else to tell
            self.ended(error)
        else:
            self.ended(None)
        finally:
            for loaded in self._loaded:
                loaded.mode.close()

    def follow(self, orders: Callable[[], list[Order]]) -> None:
        """Does what the first rank orders until that stops, in the thread of the caller.

        Args:
            orders: of the first rank, waited for before each step.
        """
        self.report_seconds = 0.0
        self._adopt(Loaded.by(self.open_generator, self.max_context))
        while True:
            for order in orders():
                if "stop" in order:
                    return
                self._obey(order)
            self._step()

    def _obey(self, order: Order) -> None:
        generator = self._loaded[-1].generator
        if "submit" in order:
            self._submit(order["submit"], ordered(generator, order))
        elif "cancel" in order:
            self._cancel(order["cancel"])
        else:
            # The first rank reports errors; one that is lost gives no further order.
            with contextlib.suppress(Exception):
                score = dict(order["score"])
                adapter = score.pop("adapter")
                generator.score_encoded([with_adapter(generator.encode_candidates(**score), adapter)])

    def _work(self) -> None:
        self._adopt(Loaded.by(self.open_generator, self.max_context))
        while True:
            taken = self._taken()
            if self.share is not None:
                self.share([{"stop": True} if command is None else command.order() for command in taken])
            for command in taken:
                if command is None:
                    return
                command.run()
            self._step()

    def _taken(self) -> list[Command | None]:
        """The commands that have come, up to the first long one; waits for one where there is nothing else to do."""
        taken: list[Command | None] = []
        waits = not any(loaded.engine.is_busy for loaded in self._loaded)
        if waits:
            self.step_began = None
        with contextlib.suppress(queue.Empty):
            while not (taken and taken[-1] is not None and taken[-1].is_long):
                command = self._commands.get(waits, None if self.share is None else HEARTBEAT_SECONDS)
                waits = False
                if command is None or command.is_wanted():
                    taken.append(command)
        self.step_began = time.monotonic()
        return taken

    def _step(self) -> None:
        for loaded in [loaded for loaded in self._loaded if loaded.engine.is_busy]:
            began, num_rows = time.monotonic(), loaded.engine.num_running
            events = loaded.engine.step()
            entered = []
            for number, num_cached in loaded.engine.entered.items():
                if number in loaded.streams:
                    loaded.streams[number].num_cached = num_cached
                    entered.append(loaded.streams[number].ticket)
            ended = time.monotonic()
            self.watch(Step(began, ended - began, num_rows + len(entered), entered))
            for event in events:
                stream = loaded.streams.get(event.request)  # None: its text could not be written
                if stream is not None:
                    stream.keep(event)
                    loaded.unreported[event.request] = stream
            # What comes between this step and the next one, or a prompt that it reads, may take long.
            reads = loaded.engine.num_waiting and loaded.engine.num_running < loaded.generator.config.batch_size
            if all_due := bool(reads) or not self._commands.empty() or ended - loaded.reported >= self.report_seconds:
                loaded.reported = ended
            due = [number for number, stream in loaded.unreported.items() if all_due or stream.is_due]
            if due:
                self.report([report for number in due for report in self._reports(loaded.unreported.pop(number))])
        for loaded in [loaded for loaded in self._loaded[:-1] if not loaded.engine.is_busy]:
            self._loaded.remove(loaded)
            loaded.mode.close()

    def _adopt(self, loaded: Loaded) -> None:
        loaded.mode.enter_context(evaluation_mode(*loaded.engine.decoder.models))
        self._loaded.append(loaded)
        self.slots = loaded.slots
        self.ready(loaded.generator)

    def _reports(self, stream: Stream) -> Iterator[Report]:
        kept, stream.kept, stream.is_due = stream.kept, [], False
        for event in kept:
            piece, cause = None, event.error
            try:
                if event.kind in ("token", "answer"):
                    piece = stream.text.add(event)
                    if stream.num_cached and piece is not None and piece.result is not None:
                        piece = replace(piece, result=replace(piece.result, num_cached=stream.num_cached))
            except Exception as raised:  # of a tokenizer; the request fails alone
                cause = raised
            if event.kind == "done" or cause is not None:
                self._cancel(stream.ticket)
            if isinstance(cause, GuideError):  # a user's mistake that shows late
                yield Report(stream.ticket, error=cause)
            elif cause is not None:
                error = Failed()
                error.__cause__ = cause
                yield Report(stream.ticket, error=error)
            elif piece is not None:
                yield Report(stream.ticket, piece)
            if cause is not None:
                return

    def _submit(self, ticket: int, prompt: EncodedText) -> None:
        loaded = self._loaded[-1]
        try:
            stream = Stream(ticket, loaded.generator.text_stream(ticket, prompt))
            number = loaded.engine.submit(prompt.request)
        except Exception as error:  # of this prompt alone
            self.report([Report(ticket, error=error)])
            return
        loaded.streams[number], self._numbers[ticket] = stream, (loaded, number)

    def _cancel(self, ticket: int) -> None:
        loaded, number = self._numbers.pop(ticket, (None, 0))
        if loaded is not None:
            num_dropped = loaded.engine.cancel(number)
            num_dropped += sum(len(event.tokens) for event in loaded.streams.pop(number).kept)
            loaded.unreported.pop(number, None)
            if num_dropped:
                self.report([Report(ticket, num_dropped=num_dropped)])


class Failed(Exception):
    """The model could not answer a prompt that was taken; the cause is why."""


class Report(NamedTuple):
    """Something that has happened to a prompt.

    Attributes:
        ticket: the prompt's, as `Worker.submit` was given it.
        piece: new text of an answer; with the last one of a prompt its result.
        error: why there will be no more: `Failed`, or what is wrong with the prompt.
        num_dropped: tokens of a prompt that was cancelled that no piece has.
    """

    ticket: int
    piece: TextPiece | None = None
    error: Exception | None = None
    num_dropped: int = 0


class Step(NamedTuple):
    """What an engine has done at once.

    Attributes:
        began: when, by `time.monotonic`.
        seconds: that it took.
        num_rows: of the engine, that had a prompt.
        entered: tickets of prompts that got a row, and were read.
    """

    began: float
    seconds: float
    num_rows: int
    entered: list[int]


@dataclass(eq=False)
class Stream:
    """A prompt that is being answered.

    Attributes:
        ticket: as `Worker.submit` was given it.
        text: of the answers.
        kept: what has not been reported.
        is_due: whether what was kept must not wait for `REPORT_SECONDS`.
        num_cached: see `TextResult`.
    """

    ticket: int
    text: TextStream
    kept: list[Event] = field(default_factory=list)
    is_due: bool = True
    num_cached: int = 0

    def keep(self, event: Event) -> None:
        """Adds an event; tokens of an answer that come one after the other are one event."""
        before = self.kept[-1] if self.kept else None
        if before is not None and before.kind == event.kind == "token" and before.number == event.number:
            self.kept[-1] = before._replace(
                tokens=[*before.tokens, *event.tokens],
                logprobs=[*before.logprobs, *event.logprobs],
                alternatives=(*before.alternatives, *event.alternatives),
            )
        else:
            self.kept.append(event)
        self.is_due = self.is_due or event.kind != "token"


@dataclass(eq=False)
class Loaded:
    """A generator with its engine, and the prompts that it answers.

    Attributes:
        slots: places of a prompt with its answers.
        streams: number in the engine -> its prompt.
        unreported: those with events that are not reported yet.
        reported: when all new tokens were reported, by `time.monotonic`.
        mode: leaves the evaluation mode.
    """

    generator: TextGenerator[Any]
    engine: Engine
    slots: int
    streams: dict[int, Stream] = field(default_factory=dict)
    unreported: dict[int, Stream] = field(default_factory=dict)
    reported: float = 0.0
    mode: ExitStack = field(default_factory=ExitStack)

    @classmethod
    def by(cls, open_generator: Callable[[], TextGenerator[Any]], max_context: int | None) -> Loaded:
        """Loads a generator, makes an engine with all its memory, and tries it.

        Args:
            open_generator, max_context: as for `Worker`.

        Raises:
            UserError: it cannot serve; its memory is more than there is; what `open_generator` raises.
            Exception: of the beginning of an answer, which it gives as a trial.
        """
        generator = open_generator()
        generator.check_serving()
        positions = getattr(getattr(generator.model, "config", None), "max_positions", None) or USUAL_CONTEXT
        # A further answer stands behind the ones before it, with a start and an end.
        answers = (generator.most_answers - 1) * (generator.config.max_len + 1) + 1
        slots = max_context or min(positions, USUAL_CONTEXT) + answers
        made = cls(generator, lasting_engine(generator.model, generator.framing, generator.config, slots), slots)
        made._check()
        return made

    def _check(self) -> None:
        """Answers the generator's own example by one token, as a trial.

        Raises:
            Exception: of that answer, e.g. logits that are not finite.
        """
        request = self.generator.encode(self.generator.example, check=False).request
        short = checked_config(request.options, max_len=1, min_len=min(request.options.min_len, 1))
        with evaluation_mode(*self.engine.decoder.models):
            self.engine.submit(replace(request, options=short))
            while self.engine.is_busy:
                for event in self.engine.step():
                    if event.error is not None:
                        raise event.error


class Command(NamedTuple):
    """What an engine's thread does between two steps.

    Attributes:
        run: does it.
        order: the same for other ranks.
        is_wanted: whether it is still to be done, when its turn comes.
        is_long: whether a step is taken behind it, before the next command.
    """

    run: Callable[[], object]
    order: Callable[[], Order] = dict
    is_wanted: Callable[[], bool] = lambda: True
    is_long: bool = False
