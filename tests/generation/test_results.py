"""How results look: at a prompt, printed, and in a notebook."""

from __future__ import annotations

import math
from html.parser import HTMLParser

from ftk.generation.results import TextAnswer, TextResult

HOSTILE = """</div><script>alert("x")</script> & '<b>"""


def answer(text: str, *probabilities: float) -> TextAnswer:
    return TextAnswer(text, list(range(len(probabilities))), [math.log(one) for one in probabilities], 0.0)


def result(before: str, text: str, behind: str) -> TextResult:
    span = (len(before), len(before + text))
    return TextResult(f"{before}[MASK]{behind}", before + text + behind, [answer(text, 0.5, 0.32)], (span,))


def test_at_a_prompt_a_result_is_a_short_line_and_printed_its_text():
    found = result("the ", "quick", " fox")
    assert repr(found) == "TextResult('the quick fox', answers=[TextAnswer('quick', p=0.16)])"
    assert f"{found} {found.answers[0]}" == "the quick fox quick"


class _Read(HTMLParser):
    """Tags and text of a piece of HTML, as a browser reads it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.text += data


def test_in_a_notebook_hostile_text_is_text():
    found = result(HOSTILE, HOSTILE, HOSTILE)
    page = _Read(found._repr_html_())
    assert [tag for tag, _ in page.tags] == ["div", "span"]
    assert page.text == found.text
    assert _Read(found.answers[0]._repr_html_()).text == HOSTILE


def test_in_a_notebook_an_answer_is_the_greener_the_likelier():
    def hue(*probabilities: float) -> int:
        ((_, attributes),) = _Read(answer("fox", *probabilities)._repr_html_()).tags
        return int(attributes["style"].split("hsla(")[1].split(",")[0])

    assert hue(0.01) < hue(0.5) < hue(0.9, 0.95) < hue(1.0) == 120
    assert hue(0.5) == hue(0.5, 0.5, 0.5)  # the mean of its tokens, whatever its length


def test_a_result_of_a_sample_has_no_text_to_mark():
    assert _Read(TextResult("a [MASK]", "", [answer("fox", 0.5)])._repr_html_()).text == ""
