"""The page of ftk-serve in headless Chromium: what it shows, sends, refuses and never does."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.cli.test_serve import JSON, KEY, ask, server
from tests.serving.services import causal
from tests.small_run import save_run

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
TEXT = "the quick [MASK] fox jumps over [MASK] dog"
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script> [MASK]"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium, such as Debian's package chromium")


@pytest.fixture(scope="module")
def place(place):
    save_run(place / "plain" / "checkpoint_1", place / "data-bin", max_positions=2048)
    (place / "keys").write_text(f"{KEY}\n")
    return place


@pytest.fixture(scope="module")
def port(place):
    with server(place, "--max-len", "12") as (_, port, _):
        yield port


@pytest.fixture(scope="module")
def chromium():
    api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: pip install playwright")
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, port):
    """Opens pages; none of them may write an error to the console, or ask another host."""
    contexts, wrong = [], []

    def open_page(port: int = port, fragment: str = "", errors: bool = False, **options):
        context = chromium.new_context(locale=options.pop("locale", "en-US"), **options)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        origin = f"http://127.0.0.1:{port}/"
        page.on("request", lambda request: request.url.startswith((origin, "data:")) or wrong.append(request.url))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("dialog", lambda dialog: (wrong.append(dialog.message), dialog.dismiss()))
        if not errors:  # the browser itself writes a line for each response of 400 and more
            page.on("console", lambda line: line.type in ("error", "warning") and wrong.append(line.text))
        page.goto(origin + fragment)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert not wrong


def fill(page, text: str):
    page.locator(".panel").first.wait_for()
    page.fill("#text", text)
    page.click("#fill")
    return whole(page)


def whole(page, panels: int = 1):
    """Waits until every panel shows whole answers; their tokens."""
    page.locator(".output[aria-busy=false]").nth(panels - 1).wait_for()
    assert not page.locator(".panel .message:visible").count(), page.locator(".panel .message").all_inner_texts()
    return page.locator(".output button.token")


def asked(page, act) -> dict:
    """The body of the request that an act makes."""
    with page.expect_request("**/v1/fill") as request:
        act()
    return json.loads(request.value.post_data)


def test_answers_stream_into_their_blanks_in_the_colour_of_their_probability(opened, port):
    page = opened()
    page.locator(".panel").first.wait_for()
    # Notes what the first token finds around it: the answer is still being written.
    page.evaluate(
        """() => new MutationObserver((all, self) => {
          if (!document.querySelector(".output span.token")) return;
          self.disconnect();
          window.seen = document.querySelector(".output").ariaBusy + document.querySelectorAll(".output button").length;
        }).observe(document.querySelector(".output"), { childList: true, subtree: true })"""
    )
    tokens = fill(page, TEXT)
    assert page.evaluate("window.seen") == "true0"
    assert page.locator(".slot").count() == 2
    body = asked(page, lambda: page.click("#fill"))
    assert body["prompt"] == TEXT
    whole(page)
    for token in tokens.all():
        share = float(token.get_attribute("aria-label").rsplit(" ", 2)[1]) / 100
        band = sum(share >= least for least in (0.05, 0.2, 0.5, 0.8))
        assert f"p{band}" in token.get_attribute("class")
    answers = ask(port, "POST", "/v1/fill", {**body, "stream": False}, JSON)[2]["results"][0]["answers"]
    for slot, answer in zip(page.locator(".slot").all(), answers, strict=True):
        assert "".join(slot.locator("button.token:not(.end)").all_inner_texts()) == answer["text"]
        places = [*answer["tokens"], *([answer["end"]] if answer["end"] else [])]
        assert sum(one["logprob"] for one in places) == pytest.approx(answer["logprob"], abs=1e-5)


def test_another_token_is_taken_and_the_rest_is_filled_anew(opened):
    page = opened()
    first = fill(page, TEXT).first
    first.click()
    choice = page.locator("#menu .choice:enabled:not([aria-current])").first
    text = choice.locator("span").first.inner_text().strip()
    body = asked(page, choice.click)
    assert body["prefix"] == [text, ""]
    whole(page)
    assert "".join(page.locator(".slot").first.locator("button.token:not(.end)").all_inner_texts()).startswith(text)
    body = asked(page, lambda: page.click(".reset"))
    assert "prefix" not in body
    whole(page)


def test_a_blank_is_edited_released_measured_and_has_other_answers(opened):
    page = opened()
    fill(page, TEXT)
    page.locator(".more").first.click()
    page.fill("#menu textarea", "brown")
    page.get_by_role("button", name="Its probability").click()
    page.get_by_text("the model's").wait_for()
    page.get_by_role("button", name="Other answers").click()
    page.get_by_text("likeliest first tokens").wait_for()
    shares = [float(one.inner_text().split()[0]) for one in page.locator("#menu .choice .faint").all()]
    assert len(shares) > 1
    assert shares == sorted(shares, reverse=True)
    body = asked(page, lambda: page.get_by_role("button", name="Use it").click())
    assert body["prompt"] == TEXT.replace("[MASK]", "brown", 1)
    whole(page)
    assert page.locator(".pin").inner_text() == "brown"
    page.click(".pin")
    assert asked(page, lambda: page.get_by_role("button", name="Let the model").click())["prompt"] == TEXT


def test_two_settings_stand_side_by_side(opened):
    page = opened()
    fill(page, TEXT)
    page.check("#compare")
    page.locator(".panel").nth(1).locator("summary").click()
    page.locator(".panel").nth(1).get_by_label("Sampling").check()
    bodies = []
    page.on("request", lambda request: request.url.endswith("fill") and bodies.append(json.loads(request.post_data)))
    page.click("#fill")
    whole(page, panels=2)
    assert [body["sampling"] for body in bodies] == [False, True]
    assert bodies[0]["seed"] == bodies[1]["seed"]


def test_two_models_stand_side_by_side_each_with_what_it_can(opened, place):
    causal(place / "gpt", place / "data-bin" / "tokenizer")
    with server(place, "--models", "gpt=gpt", "--max-len", "12") as (_, port, _):
        page = opened(port)
        fill(page, TEXT)
        page.check("#compare")
        second = page.locator(".panel").nth(1)
        second.get_by_label("Model").select_option("gpt")
        bodies = []
        page.on("request", lambda one: one.url.endswith("fill") and bodies.append(json.loads(one.post_data)))
        page.fill("#text", "the quick brown fox")
        page.click("#fill")
        whole(page, panels=2)
        assert [body["model"] for body in bodies] == ["run", "gpt"]
        for panel, body in zip(page.locator(".panel").all(), bodies, strict=True):
            (result,) = ask(port, "POST", "/v1/fill", {**body, "stream": False}, JSON)[2]["results"]
            tokens = panel.locator(".slot button.token:not(.end)").all_inner_texts()
            assert "".join(tokens) == result["answers"][0]["text"]
        page.fill("#text", TEXT)
        page.click("#fill")
        page.locator(".output[aria-busy=false]").nth(1).wait_for()
        assert [panel.locator(".slot").count() for panel in page.locator(".panel").all()] == [2, 1]
        assert page.get_by_role("button", name="Insert [MASK]").count() == 1
        page.locator(".panel").first.get_by_label("Model").select_option("gpt")
        assert page.get_by_role("button", name="Insert [MASK]").count() == 0
        assert page.locator(".panel").first.locator(".output").inner_text() == ""
        page.click("#fill")
        whole(page, panels=2)
        assert page.locator(".output").first.inner_text() == second.locator(".output").inner_text()


def test_a_link_holds_the_text_the_settings_and_the_seed(opened):
    page = opened()
    fill(page, TEXT + " 𠮷")
    shown = page.locator(".output").inner_text()
    page.click("#share")
    address = page.url
    assert "#" in address
    other = opened(fragment=address[address.index("#") :])
    other.locator(".panel").first.wait_for()
    assert other.input_value("#text") == TEXT + " 𠮷"
    assert not other.locator(".output").inner_text(), "a link asks nothing by itself"
    other.click("#fill")
    whole(other)
    assert other.locator(".output").inner_text() == shown


def test_copies_are_requests_that_work(opened, tmp_path):
    page = opened(permissions=["clipboard-read", "clipboard-write"])
    fill(page, "it's a [MASK]\nfox")
    found = {}
    for name in ("curl", "python"):
        page.click(f".{name}")
        page.locator(f".{name}", has_text="Copied").wait_for()
        found[name] = page.evaluate("navigator.clipboard.readText()")
    (tmp_path / "ask.py").write_text(found["python"], encoding="utf-8")
    (tmp_path / "ask.sh").write_text(found["curl"], encoding="utf-8")
    answered = subprocess.run([sys.executable, tmp_path / "ask.py"], capture_output=True, text=True, timeout=60)
    assert answered.stdout.startswith("it's a"), answered.stderr
    if shutil.which("curl"):
        streamed = subprocess.run(["sh", tmp_path / "ask.sh"], capture_output=True, text=True, timeout=60).stdout
        assert streamed.rstrip().endswith("data: [DONE]")


@pytest.mark.parametrize("at_once", [False, True])  # whether the page has all events when it is stopped
def test_stop_ends_the_request(opened, place, at_once):
    with server(place, "--path", "plain", "--max-len", "120") as (_, port, _):
        page = opened(port)
        page.locator(".panel").first.wait_for()
        if at_once:
            content = ask(port, "POST", "/v1/fill", {"prompt": "the [MASK] " * 16, "stream": True}, JSON)[2]
            body = ": ping\n\n" + content.replace("\n\n", "\n\n: ping\n\n")
            page.route("**/v1/fill", lambda route: route.fulfill(body=body, content_type="text/event-stream"), times=1)
        page.evaluate(
            """() => new MutationObserver((all, self) => {
              if (!document.querySelector(".output .token")) return;
              self.disconnect();
              document.querySelector("#stop").click();
            }).observe(document.querySelector(".output"), { childList: true, subtree: true })"""
        )
        page.fill("#text", "the [MASK] " * 16)
        page.click("#fill")
        page.get_by_text("Stopped.").wait_for()
        assert page.locator("#stop").is_disabled()
        assert page.locator(".slot").last.inner_text() == ""
        fill(page, "the [MASK]")  # and the next one is answered


def test_errors_say_what_to_do(opened, place):
    page = opened(errors=True)
    page.locator(".panel").first.wait_for()
    page.fill("#text", "the 【mask】 fox")
    page.click("#fill")
    page.locator(".panel .message").wait_for()
    assert page.locator(".output.busy").count() == 0
    assert page.locator(".panel .message button").inner_text() == "Write [MASK]"
    page.locator(".panel .message button").click()
    whole(page)
    assert page.input_value("#text") == "the [MASK] fox"
    page.fill("#text", "a fox and " * 10_000)  # 100 KB
    page.click("#fill")
    page.get_by_text("shorten it").wait_for()
    with server(place) as (process, port, _):
        other = opened(port, errors=True)
        fill(other, TEXT)
        process.kill()
        process.join()
        other.click("#fill")
        other.get_by_text("does not answer").wait_for()


def test_a_long_text_is_answered(opened, place):
    with server(place, "--path", "plain", "--max-context", "4000", "--truncate", "left") as (_, port, _):
        page = opened(port)
        fill(page, "the quick brown fox " * 5000 + "[MASK] dog")
        assert len(page.locator(".output").inner_text()) > 100_000


def test_a_key_is_asked_for_and_kept_in_memory_alone(opened, place):
    with server(place, "--api-key-file", "keys") as (_, port, _):
        page = opened(port, errors=True)
        page.fill("#key", KEY)
        page.locator("#key").blur()
        fill(page, TEXT)
        assert KEY not in page.evaluate("JSON.stringify(localStorage) + location.href")


def test_nothing_of_a_hostile_text_runs(opened):
    panel = {"pins": [[0, HOSTILE.partition(" [")[0]]], "settings": {"seed": "<b>"}}
    text = f"{HOSTILE} [MASK]"  # the link pins the first blank
    page = opened(fragment="#" + quote(json.dumps({"v": 1, "text": text, "panels": [panel]})))
    page.locator(".panel").first.wait_for()
    assert page.input_value("#text") == text
    page.locator(".panel").first.wait_for()
    page.click("#fill")  # the text as it is: another one would forget the pin
    whole(page)
    assert page.locator(".output").inner_text().count("<img src=x") == 2
    assert not page.locator("img, .output script").count()


def test_a_script_that_is_put_into_the_page_does_not_run(opened):
    page = opened(errors=True)  # the policy's own line
    script = "Object.assign(document.createElement('script'), { textContent: 'window.ran = 1' })"
    page.evaluate(f"document.body.append({script})")
    assert page.evaluate("window.ran") is None


def test_an_enter_that_ends_a_composition_sends_nothing(opened):
    page = opened()
    page.locator(".panel").first.wait_for()
    sent = []
    page.on("request", lambda request: request.method == "POST" and sent.append(request.url))
    page.focus("#text")
    devtools = page.context.new_cdp_session(page)
    devtools.send("Input.imeSetComposition", {"text": "zhong", "selectionStart": 5, "selectionEnd": 5})
    key = {"type": "rawKeyDown", "windowsVirtualKeyCode": 229, "key": "Enter", "code": "Enter", "modifiers": 2}
    devtools.send("Input.dispatchKeyEvent", key)
    devtools.send("Input.insertText", {"text": "中"})
    assert page.input_value("#text") == "中"
    assert not sent
    page.fill("#text", TEXT)
    page.keyboard.press("Enter")  # a new line
    assert not sent
    page.keyboard.press("Control+Enter")
    whole(page)
    assert len(sent) == 1


def test_the_keyboard_reaches_every_token(opened):
    page = opened()
    tokens = fill(page, TEXT)
    first, second = (tokens.nth(number) for number in (0, 1))
    first.focus()
    page.keyboard.press("ArrowRight")
    assert second.evaluate("one => one === document.activeElement")
    page.keyboard.press("Enter")
    page.locator("#menu .choice").first.wait_for()
    page.keyboard.press("Escape")
    assert page.locator("#menu").is_hidden()
    assert second.evaluate("one => one === document.activeElement")
    page.focus("#text")
    page.keyboard.press("End")
    page.get_by_role("button", name="Insert [MASK]").click()
    assert page.input_value("#text") == TEXT + "[MASK]"


@pytest.mark.parametrize(("scheme", "locale", "words"), [("light", "en-US", "Fill"), ("dark", "zh-CN", "填写")])
def test_a_phone_in_both_schemes_and_languages(opened, scheme, locale, words):
    page = opened(viewport={"width": 390, "height": 844}, color_scheme=scheme, locale=locale, has_touch=True)
    fill(page, TEXT + " and a very long line of words that has to be broken somewhere")
    assert words in page.locator("#fill").inner_text()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.locator("summary").first.click()
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    if shots := os.environ.get("FTK_SCREENSHOTS"):
        page.screenshot(path=Path(shots) / f"phone_{scheme}.png", full_page=True)


def test_history_is_kept_and_cleared(opened):
    page = opened()
    fill(page, TEXT)
    page.reload()
    page.locator(".panel").first.wait_for()
    page.locator("#history summary").click()
    page.locator("#history li button").click()
    assert page.input_value("#text") == TEXT
    page.click("#clear")
    assert not page.locator("#history li").count()
    page.uncheck("#keep")
    fill(page, TEXT)
    assert not page.locator("#history li").count()
