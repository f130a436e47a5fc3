"""The page at `/` in a headless Chromium, over a fake worker whose tokens are markup, behind a key."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final
from urllib.request import Request, urlopen

import pytest
from playwright.sync_api import Browser, Page, Route, expect
from tokenizers import Tokenizer, models, pre_tokenizers

from doubles.browser import headless_chromium
from doubles.command import Running, running

KEY: Final = "sk-0123456789abcdef"
MARKUP: Final = "<img/src=x/onerror=window.hacked=1><script>window.hacked=1</script>"
TEMPLATE: Final = "{% for message in messages %}{{ message.content }} {% endfor %}"
STEP_S: Final = 0.01
NUM_DRAFTS: Final = 3
PATIENCE_S: Final = 10.0
"""A step verifies, at most."""
PHONE: Final = {"width": 320, "height": 640}

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with headless_chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of markup, and a template."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = Tokenizer(models.WordLevel({f"{MARKUP}{index}": index for index in range(97)}, unk_token=f"{MARKUP}0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment, unused-ignore]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def server(browser: Browser, model: Path) -> Iterator[Running]:
    """After the browser: without one none is needed."""
    keys = model / "keys"
    keys.write_text(KEY)
    settings = [
        f"tokenizer={model}",
        f"fake_step_s={STEP_S}",
        "fake_vocab_size=97",
        "max_num_seqs=8",
        "num_blocks=1024",
    ]
    settings += [f"fake_num_drafts={NUM_DRAFTS}", "scheduled_drafts=false"]
    sets = [part for setting in settings for part in ("--set", setting)]
    with running("serve", "fake", "--http", "127.0.0.1:0", "--api-keys", str(keys), *sets) as server:
        while " http://" not in server.written:
            server.read_until("\n", times=server.written.count("\n") + 1)
        yield server


@pytest.fixture(scope="module")
def url(server: Running) -> str:
    found = re.search(r"listening on (http://\S+)\n", server.written)
    assert found is not None
    return found[1]


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """Open, with the key given. Nothing may go wrong in it, and nothing may be asked of anybody else."""
    with browser.new_context() as context, context.new_page() as page:
        wrong: list[str] = []
        asked: list[str] = []
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda message: wrong.append(message.text) if "Security" in message.text else None)
        page.on("request", lambda request: asked.append(request.url))
        page.goto(url)
        give_key(page)
        yield page
        assert wrong == [] and asked
        assert all(each.startswith((f"{url}/", "data:")) for each in asked)


def give_key(page: Page, key: str = KEY) -> None:
    page.get_by_label("API key").fill(key)
    page.get_by_label("API key").blur()
    expect(page.locator("#status")).to_have_text("ok")
    expect(page.get_by_label("Model")).to_have_value("fake")


def send(page: Page, max_tokens: int, prompt: str = "hello") -> None:
    page.get_by_label("Prompt").fill(prompt)
    page.get_by_label("Tokens at most").fill(str(max_tokens))
    page.get_by_role("button", name="Send").click()


def figure(page: Page, name: str) -> float:
    return float(page.locator(f"#{name}").inner_text().removesuffix(" %"))


def test_tokens_show_while_they_come_and_the_page_says_how_fast(page: Page) -> None:
    send(page, 200)
    expect(page.locator("#content")).to_have_text(re.compile(r".{500}", re.DOTALL))
    early = page.locator("#content").inner_text()
    assert page.get_by_role("button", name="Stop").is_enabled(), "it is not at its end yet"
    expect(page.locator("#summary")).to_have_text(
        re.compile(r"^length, 200 tokens, first after \d\.\d\d s, \d+\.\d tokens/s$"), timeout=30_000
    )
    whole = page.locator("#content").inner_text()
    assert whole.startswith(early) and whole.count(MARKUP) == 200
    assert page.get_by_role("button", name="Stop").is_disabled()
    expect(page.locator("#error")).to_be_empty()


def test_what_a_model_says_is_never_markup(page: Page) -> None:
    send(page, 20, MARKUP)
    expect(page.locator("#summary")).to_contain_text("20 tokens")
    assert page.locator("#content").inner_text().count(MARKUP) == 20
    assert page.locator("#content").evaluate("it => [it.childNodes.length, it.firstChild.nodeType]") == [1, 3]
    assert page.locator("img").count() == 0 and page.locator("script").count() == 1
    assert page.evaluate("window.hacked") is None


def test_the_browser_would_not_take_markup_or_calls_to_others(browser: Browser, url: str) -> None:
    """The policy alone, without the care of the page's own code; in a turn of its own, as a debugger may do more."""
    with browser.new_context() as context, context.new_page() as page:
        page.goto(url)
        for attempt in (
            "document.body.innerHTML = '<p>x</p>'",
            "eval('1')",
            "fetch('http://127.0.0.2:9/')",
            "fetch('data:,x')",
        ):
            told = page.evaluate(
                "() => new Promise((resolve) => setTimeout(async () => {"
                f"  try {{ await ({attempt}); resolve('done') }} catch (error) {{ resolve(error.name) }}"
                "}))"
            )
            assert told in ("TypeError", "EvalError"), attempt
        page.evaluate("document.body.append(Object.assign(document.createElement('style'), {textContent: 'p{}'}))")
        assert page.evaluate("[...document.styleSheets].filter(sheet => sheet.href === null).length") == 0


def test_stop_ends_the_request_within_steps(page: Page, url: str) -> None:
    send(page, 3000)
    expect(page.locator("#content")).not_to_be_empty()
    page.get_by_role("button", name="Stop").click()
    expect(page.locator("#summary")).to_have_text(re.compile("^stopped, first after"))
    expect(page.locator("#running")).to_have_text("0")
    aborted = 'deepinfer:request_success_total{engine="0",finished_reason="abort",model_name="fake"}'
    until_s = time.monotonic() + PATIENCE_S  # a request is counted when its last step is back
    while counter(url, aborted) < 1:
        assert time.monotonic() < until_s
        time.sleep(0.05)
    expect(page.locator("#error")).to_be_empty()
    send(page, 5)
    expect(page.locator("#summary")).to_contain_text("5 tokens")


def test_figures_are_those_of_the_engine(page: Page, url: str) -> None:
    send(page, 400)
    expect(page.locator("#running")).to_have_text("1")
    expect(page.locator("#rate")).to_have_text(re.compile(r"^[1-9]\d+$"))
    assert 10 < figure(page, "rate") <= (1 + NUM_DRAFTS) / STEP_S
    assert 0 < figure(page, "cache") < 100
    assert 1 < figure(page, "acceptance") <= 1 + NUM_DRAFTS
    expect(page.locator("#summary")).to_contain_text("400 tokens", timeout=30_000)
    expect(page.locator("#running")).to_have_text("0")
    page.reload()
    give_key(page)  # what is shown now is since the server's start
    forwards = counter(url, "deepinfer:spec_decode_forwards_total")
    wanted = 1 + counter(url, "deepinfer:spec_decode_num_accepted_tokens_total") / forwards
    assert figure(page, "acceptance") == pytest.approx(wanted, abs=0.006)
    expect(page.locator("#waiting")).to_have_text("0")


def test_a_fault_is_told_in_words(page: Page) -> None:
    send(page, 10_000_000)
    expect(page.get_by_role("alert")).to_contain_text("max_tokens")
    assert page.get_by_role("button", name="Send").is_enabled()


def test_a_fault_after_the_first_token_is_told_beside_what_came(page: Page, url: str) -> None:
    events = [
        'data: {"choices": [{"delta": {"reasoning_content": "so \\ud83d\\ude00"}}]}',
        ": keep-alive",
        'data: {"choices": [{"delta": {"content": "but"}}]}',
        'data: {"error": {"message": "the engine lost a worker"}}',
    ]

    def answer(route: Route) -> None:
        route.fulfill(status=200, content_type="text/event-stream", body="\n\n".join([*events, ""]))

    page.route("**/v1/chat/completions", answer)
    send(page, 5)
    expect(page.get_by_role("alert")).to_have_text("the engine lost a worker")
    expect(page.locator("#content")).to_have_text("but")
    expect(page.locator("#reasoning")).to_have_text("so \U0001f600")
    del events[3]
    send(page, 5)
    expect(page.get_by_role("alert")).to_have_text("the answer was cut off")


def test_a_wrong_key_is_told_and_the_right_one_is_kept_nowhere(browser: Browser, url: str) -> None:
    with browser.new_context() as context, context.new_page() as page:
        page.goto(url)
        expect(page.locator("#status")).to_contain_text("a key is expected")
        page.get_by_label("API key").fill("sk-wrong-wrong-wrong")
        page.get_by_label("API key").blur()
        expect(page.locator("#status")).to_contain_text("a key is expected")
        give_key(page)
        stored = "[localStorage.length, sessionStorage.length, document.cookie, location.href]"
        assert page.evaluate(stored) == [0, 0, "", f"{url}/"]
        page.reload()
        expect(page.get_by_label("API key")).to_have_value("")
        expect(page.locator("#status")).to_contain_text("a key is expected")


def test_it_is_readable_on_a_phone(page: Page) -> None:
    page.set_viewport_size(PHONE)  # type: ignore[arg-type, unused-ignore]
    send(page, 30)
    expect(page.locator("#summary")).to_contain_text("30 tokens")
    assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], "nothing is wider than the screen"
    sizes = page.evaluate(
        "[...document.querySelectorAll('body *')].map(it => parseFloat(getComputedStyle(it).fontSize))"
    )
    assert min(sizes) >= 12
    for name in ("Send", "Stop"):
        box = page.get_by_role("button", name=name).bounding_box()
        assert box is not None and box["height"] >= 40


def test_the_page_refreshes_without_filling_the_log(page: Page, server: Running) -> None:
    page.wait_for_timeout(1500)
    assert "/stats 200" not in server.read_until("GET / 200")


def counter(url: str, name: str) -> float:
    """Its value, summed over what follows `name`."""
    with urlopen(Request(f"{url}/metrics", headers={"authorization": f"Bearer {KEY}"})) as response:
        lines = response.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))
