"""ftk's models in lm-evaluation-harness (Gao et al. 2021; ftk[harness]), the only file that imports it.

    lm_eval --model ftk --model_args path=run --tasks configs/harness/ftk_copa.yaml
    python -m ftk.evaluation.harness --model ftk --model_args path=run --tasks lambada_openai

lm_eval has no entry points for models: it knows those that something has imported. Files of tasks are read before it
looks for the model, and those of configs/harness name a function of this module. The second line is the same command
with this module imported.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

import ftk  # from outside, as any user of the harness: it calls this class, nothing in ftk does
from ftk.errors import UserError, did_you_mean, visible
from ftk.evaluation.likelihood import DEFAULT_WINDOW, Query, Reading, encode_pair, fitted, log_likelihoods, num_read
from ftk.generation.config import checked_config
from ftk.generation.engine.request import TEXT, Request

try:
    import lm_eval.models  # noqa: F401  # its own models: the harness looks for them only if it knows none
    from lm_eval import utils
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ModuleNotFoundError as error:
    message = f"the package {error.name} is missing; install it by: pip install 'ftk[harness]'"
    if __name__ != "__main__":
        raise UserError(message) from error
    print(f"ftk.evaluation.harness: {message}", file=sys.stderr)
    sys.exit(2)

_MAX_NEW_TOKENS = 256  # of an answer where a task does not say it; the harness' own default

_OPTIONS = {"do_sample": "sampling", "num_beams": "beam"}
"""Options of generation that the harness calls otherwise."""


@register_model("ftk")
class FTK(LM):
    """A checkpoint of any family that writes text, or a Hugging Face folder that ftk reads.

    Args:
        path: as of `ftk.load_generator`.
        device: likewise; a GPU that is not there is taken for "auto", since the harness' command asks for the first one
            where its user asks for none.
        batch_size: prompts that are answered at once; log-probabilities are batched by tokens. A text that is no
            number, such as "auto", is 16.
        max_batch_size: not used.
        precision: "fp32", or "bf16" for weights and products.
        ema: as of `ftk.load_generator`.
        user_dir: likewise.
        max_length: most tokens of a window of running text; None: what the model has positions for, 1023 without limit.
        unidirectional: a model that reads contexts in both directions reads them from left to right.
        expected: what a model with several masks is asked for: word, sentence or text.
        closed: whether the end of the text stands behind the place of the answer; None: as in training.
        answers: how `generate_until` searches: fields of the generation's options.
    """

    def __init__(
        self,
        path: str,
        device: str | None = None,
        batch_size: int | str = 16,
        max_batch_size: int | None = None,
        precision: str = "fp32",
        ema: bool = False,
        user_dir: str | None = None,
        max_length: int | None = None,
        unidirectional: bool = False,
        expected: str = TEXT,
        closed: bool | None = None,
        **answers: Any,
    ) -> None:
        super().__init__()
        if precision not in ("fp32", "bf16"):
            raise UserError(f"precision is {precision!r}; it is fp32 or bf16")
        import torch

        rows = int(batch_size) if str(batch_size).isdecimal() and int(batch_size) > 0 else 16
        dtype = torch.bfloat16 if precision == "bf16" else None
        options = {"max_len": 1, "batch_size": rows, **answers}
        if device is None or (device.startswith("cuda") and not torch.cuda.is_available()):
            device = "auto"
        self.generator = ftk.load_generator(path, device, ema=ema, dtype=dtype, user_dir=user_dir, **options)
        if self.generator.framing is None:
            raise UserError(f"{path} fills masks in a text and gives no probability of one; choose another model")
        if self.generator.tokenizer.source is not None:
            raise UserError(
                f"{path} has a tokenizer of its own for sources, which tasks of the harness do not use; "
                "ftk-generate DATA --gen-subset SPLIT --scoring NAME does"
            )
        self.reading = Reading(unidirectional=unidirectional, expected=expected)
        self.closed = closed
        special = self.generator.tokenizer.special
        self.eot_token_id: int | None = special.text_end
        self._around = num_read(self.generator.framing, [], expected, closed)
        self._kept = 0 if self._around else 1
        limit: int | None = getattr(self.generator.framing, "max_positions", None)
        self.max_length = max_length or (DEFAULT_WINDOW if limit is None else limit - self._around)
        self._chats: dict[str, Any] = {}  # what `apply_chat_template` gave -> the prompt
        self._path = path

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(context, continuation) -> its log-probability, and whether each of its tokens is the likeliest."""
        pairs = [self._encoded(*request.args) for request in requests]
        found = self._scored(pairs, disable_tqdm)
        for request, answer in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request.args, answer)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """(text,) -> its log-probability; each token counts once, in windows of `max_length` tokens."""
        windows: list[tuple[Sequence[int], Sequence[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            prefix = -1  # replaced below
            ids = self.generator.tokenizer.encode(request.args[0])
            rolling = utils.get_rolling_token_windows(ids, prefix, max_seq_len=self.max_length, context_len=1)
            for before, own in map(utils.make_disjoint_window, rolling):
                windows.append((self._beginning() if list(before) == [prefix] else before, own))
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._scored(windows, disable_tqdm), strict=True):
            totals[owner] += logprob
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """(context, options) -> the answer, up to the first of the strings `until`."""
        asked = [self._request(*request.args) for request in requests]
        with tqdm(total=len(asked), disable=disable_tqdm or self.rank != 0) as bar:
            answers = self.generator.engine(asked).answers(asked, bar.update) if asked else []
        texts = []
        for request, own, (answer,) in zip(requests, asked, answers, strict=True):
            text = own.processors.cut(self.generator.tokenizer.decode(answer.tokens))
            self.cache_hook.add_partial("generate_until", request.args, text)
            texts.append(text)
        return texts

    @property
    def tokenizer_name(self) -> str:
        """For the names of the harness' cached requests."""
        return str(self._path).replace("/", "__")

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """A conversation as JSON, which stands for its prompt: a text has no special tokens, and a template has."""
        converse = self.generator.conversation
        if converse is None or not add_generation_prompt:
            why = "the model did not learn from conversations, and its tokenizer has no chat template"
            why = why if converse is None else "answers that a task begins (gen_prefix) are not asked for by a template"
            raise UserError(f"{why}; leave apply_chat_template out")
        text = json.dumps(chat_history, ensure_ascii=False)
        self._chats[text] = converse(chat_history[-1]["content"], chat_history[:-1], {})
        return text

    def chat_template(self, chat_template: bool | str = False) -> str:
        """The tokenizer's own, for the harness' file of results; "": the template is that of the training."""
        if isinstance(chat_template, str):
            raise UserError(f"apply_chat_template is {chat_template}; a model has one template here; give no name")
        return self.generator.tokenizer.chat_template or ""

    def get_model_info(self) -> dict[str, Any]:
        """What the numbers depend on, for the harness' file of results."""
        config = getattr(self.generator.model, "config", None)
        reading = dataclasses.asdict(self.reading)
        return {"ftk": ftk.__version__, "model": type(config).__name__, "max_length": self.max_length, **reading}

    def _encoded(self, context: str, continuation: str) -> tuple[Sequence[int] | str, Sequence[int]]:
        """Token ids of both; of a conversation its text."""
        if context in self._chats:
            return context, self.generator.tokenizer.encode(continuation)
        if context:
            apart = hasattr(self.generator.model, "encode")
            before, own = encode_pair(self.generator.tokenizer, context, continuation, apart=apart)
            return before or self._beginning(), own
        before, own = self._beginning(), self.generator.tokenizer.encode(continuation)
        return (before, own) if not before or own[:1] != before else (before, own[1:])

    def _beginning(self) -> list[int]:
        """What stands in front of the first token of a text: nothing that a model's framing does not add by itself."""
        if self._around:
            return []
        if self.eot_token_id is None:
            raise UserError("the tokenizer has no token that ends a text, which stands in front of an empty context")
        return [self.eot_token_id]

    def _scored(
        self, pairs: Sequence[tuple[Sequence[int] | str, Sequence[int]]], disable_tqdm: bool
    ) -> list[tuple[float, bool]]:
        """Log-probability and greediness of each; pairs with the same context share one reading of it."""
        framing = self.generator.framing
        places: dict[tuple[int, ...] | str, list[int]] = {}
        for place, (context, own) in enumerate(pairs):
            if not isinstance(context, str):  # the last token is not read
                context = tuple(fitted(framing, context, len(own) - 1, self.reading.expected, self.closed))
            places.setdefault(context, []).append(place)
        asked = []
        for context, own in places.items():
            ids, prompt = ((), self._chats[context]) if isinstance(context, str) else (context, None)
            asked.append(Query(ids, [pairs[place][1] for place in own], prompt))
        with tqdm(total=len(asked), disable=disable_tqdm or self.rank != 0) as bar:
            found = log_likelihoods(
                self.generator, asked, self.reading, closed=self.closed, kept=self._kept, progress=bar.update
            )
        results = [(0.0, True)] * len(pairs)
        for own, scored in zip(places.values(), found, strict=True):
            for place, answer in zip(own, scored, strict=True):
                results[place] = (sum(answer.logprobs), answer.is_greedy)
        return results

    def _request(self, context: str, given: Mapping[str, Any]) -> Request:
        options = dict(given)
        until = options.pop("until", None) or []
        stops = [until] if isinstance(until, str) else list(until)
        options = {_OPTIONS.get(name, name): value for name, value in options.items()}
        options["max_len"] = options.pop("max_gen_toks", _MAX_NEW_TOKENS)
        if not options.get("temperature", 1.0):  # the harness' way to say greedy
            options |= {"temperature": 1.0, "sampling": False}
        config = self.generator.config
        unknown = [name for name in options if not hasattr(config, name)]
        if unknown:
            raise UserError(
                f"generation_kwargs: unknown option {unknown[0]!r}; {did_you_mean(unknown[0], vars(config))}"
            )
        config = checked_config(config, **options)
        prompt = self._chats.get(context)
        if prompt is None:
            ids = self.generator.tokenizer.encode(context)
            kept = fitted(self.generator.framing, ids, config.max_len, self.reading.expected, self.closed)
            asked = kept or self._beginning()
            prompt = self.generator.framing.ask(asked, (), self.reading.expected, self.closed)
        request = Request(prompt, config, seed=config.seed)
        steering = self.generator.steering
        if steering is not None:
            request.processors = steering.of({"stop": [stop for stop in stops if stop]}, 1) or steering.processors
        self.generator.framing.check(request)
        return request


def documents(rows: Any) -> Any:
    """The rows of a task as they are. A file of a task that names it makes lm_eval import this module, and know ftk."""
    return rows


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    sys.modules["ftk.evaluation.harness"] = sys.modules["__main__"]  # the module that tasks name is not made twice
    try:
        cli_evaluate()
    except UserError as error:
        print(f"lm_eval: {visible(str(error))}", file=sys.stderr)
        sys.exit(2)
