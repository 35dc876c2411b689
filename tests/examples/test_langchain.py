"""The example of LangChain fills a template, in the process and over HTTP."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

import ftk
from tests.cli.test_serve import server

pytest.importorskip("langchain_core", reason="needs langchain-core: pip install langchain-core")
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "langchain"
TEMPLATE = "the {color} [MASK] jumps over [MASK]"
PROMPT = TEMPLATE.format(color="brown")


@pytest.fixture
def fill(monkeypatch, capsys):
    def run(where: str) -> str:
        monkeypatch.setattr(sys, "argv", [str(EXAMPLE / "fill.py"), where, TEMPLATE, "color=brown"])
        monkeypatch.syspath_prepend(str(EXAMPLE))
        runpy.run_path(str(EXAMPLE / "fill.py"), run_name="__main__")
        return capsys.readouterr().out.removesuffix("\n")

    return run


def test_in_the_process(place, fill, monkeypatch):
    generator = ftk.load_generator(place / "run", max_len=16)
    assert fill(str(place / "run")) == generator.generate(PROMPT).text
    monkeypatch.syspath_prepend(str(EXAMPLE))
    from llm import FtkLLM

    llm = FtkLLM(generator=generator)
    prompts = [PROMPT, "a lazy [MASK]"]
    assert llm.batch(prompts) == [one.text for one in generator.generate(prompts)]
    assert llm.invoke(PROMPT, max_len=2) == generator.generate(PROMPT, options={"max_len": 2}).text
    (generation,) = llm.generate(prompts[1:]).generations[0]
    assert len(generation.generation_info["probabilities"]) == 1


def test_over_http(place, fill):
    pytest.importorskip("langchain_openai", reason="needs langchain-openai: pip install langchain-openai")
    with server(place) as (_, port, _):
        found = fill(f"http://127.0.0.1:{port}/v1")
    assert found == ftk.load_generator(place / "run", max_len=16).generate(PROMPT).text
