"""Fills a template by LangChain: with a model in this process, or with one behind ftk-serve.

python examples/langchain/fill.py run "{name} was born in [MASK] ." name=Ann
python examples/langchain/fill.py http://127.0.0.1:8000/v1 "{name} was born in [MASK] ." name=Ann
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from langchain_core.prompts import PromptTemplate


def llm_of(where: str) -> Any:
    """An LLM whose text is the prompt's with its blanks filled, greedily.

    Args:
        where: folder of a model, or address of a service.
    """
    if not where.startswith("http"):
        from llm import FtkLLM  # beside this file

        return FtkLLM.load(where, max_len=16)
    from langchain_openai import OpenAI

    return OpenAI(
        base_url=where,
        api_key=os.environ.get("FTK_API_KEY", "none"),
        model=os.environ.get("FTK_MODEL", "run"),
        max_tokens=16,
        temperature=0,
        extra_body={"echo": True},
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", help="folder of a model, or address of a service")
    parser.add_argument("template", help="a prompt with {names}")
    parser.add_argument("values", nargs="*", metavar="NAME=TEXT")
    options = parser.parse_args()
    template = PromptTemplate.from_template(options.template)
    values = dict(value.partition("=")[::2] for value in options.values)
    missing = sorted(set(template.input_variables) ^ set(values))
    if missing:
        parser.error(f"give NAME=TEXT for each name of the template; look at {', '.join(missing)}")
    for part in (template | llm_of(options.where)).stream(values):
        print(part, end="", flush=True)
    print()


if __name__ == "__main__":
    main()
