"""A model of ftk as an LLM of LangChain, in the same process: no server is needed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from langchain_core.language_models.llms import BaseLLM
from langchain_core.outputs import Generation, GenerationChunk, LLMResult

import ftk


class FtkLLM(BaseLLM):
    """Gives a prompt's text with the model's answers: blanks are filled, other texts continued.

        FtkLLM.load("run", max_len=8).invoke("York City is a football [MASK] in England .")

    Prompts of a `batch` are answered together. `generation_info` has the probability of each answer.
    """

    generator: Any

    @classmethod
    def load(cls, path: str, **options: Any) -> FtkLLM:
        """Arguments as of `ftk.load_generator`."""
        return cls(generator=ftk.load_generator(path, **options))

    @property
    def _llm_type(self) -> str:
        return "ftk"

    def _generate(
        self, prompts: list[str], stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> LLMResult:
        results = self.generator.generate(prompts, options=[_options(stop, kwargs)] * len(prompts))
        return LLMResult(
            generations=[
                [Generation(text=one.text, generation_info={"probabilities": [a.probability for a in one.answers]})]
                for one in results
            ]
        )

    def _stream(
        self, prompt: str, stop: list[str] | None = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[GenerationChunk]:
        for piece in self.generator.stream(prompt, options=_options(stop, kwargs)):
            chunk = GenerationChunk(text=piece.filled)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk


def _options(stop: list[str] | None, given: dict[str, Any]) -> dict[str, Any]:
    """Options of a prompt, as `generate` takes them: those of `invoke` or `bind`, e.g. `max_len`, `forbid_words`."""
    return {**given, **({"stop": stop} if stop else {})}
