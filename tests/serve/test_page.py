"""The page at /: its files by themselves, then in a headless Chromium against the server with a scripted engine."""

import contextlib
import re
import threading
import tomllib
from fnmatch import fnmatch
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from tests.serve.fake_engine import FakeEngine, serving
from trainer.serve.config import ServeConfig
from trainer.serve.http.api import PAGE_DIR

ROOT = Path(__file__).parent.parent.parent
FILES = ("index.html", "app.js", "style.css")
ANSWER = "Grüße 👩‍👩‍👧 & <b onclick=alert(1)>bold</b>\n  indented"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FREE, CACHED, SHARED = -1, -2, -3


class BusyEngine(FakeEngine):
    """A FakeEngine with a KV cache to look at: two sequences of others that share a prefix, a third that waits, and
    the requests of the page behind them, four blocks each."""

    num_blocks = 64

    async def state(self) -> dict[str, Any]:
        others = [_sequence("cmpl-alpha", adapter="sql", blocks=7), _sequence("cmpl-beta", blocks=5)]
        mine = [
            _sequence(stream.request_id, adapter=stream.adapter, blocks=4, limit=stream.params.max_tokens)
            for stream in self.active
        ]
        owners = [SHARED] * 3 + [0] * 4 + [1] * 2 + [CACHED] * 5
        for position in range(2, 2 + len(mine)):
            owners += [position] * 4
        owners += [FREE] * (self.num_blocks - len(owners))
        return {
            "model": self.model_name,
            "adapters": list(self.loaded),
            "blocks": owners,
            "num_blocks": self.num_blocks,
            "num_free_blocks": owners.count(FREE) + owners.count(CACHED),
            "num_cached_blocks": owners.count(CACHED),
            "block_size": 16,
            "running": [*others, *mine],
            "waiting": [_sequence("cmpl-gamma", status="waiting", blocks=0, computed=0)],
            "num_waiting": 1,
            "num_steps": 10,
            "preemptions": 3,
            "prefix_hit_rate": 0.25,
            "draft_acceptance_rate": None,
            "ttft_s": 0.031,
            "prompt_tokens_per_s": 1234.0,
            "generated_tokens_per_s": 56.7,
        }


def _sequence(
    request_id: str,
    *,
    blocks: int,
    adapter: str | None = None,
    status: str = "running",
    computed: int = 60,
    limit: int | None = 40,
) -> dict[str, Any]:
    return {
        "request_id": request_id,
        "index": 0,
        "status": status,
        "adapter": adapter,
        "priority": 0,
        "num_prompt_tokens": 50,
        "num_computed_tokens": computed,
        "num_output_tokens": max(0, computed - 50),
        "max_tokens": limit,
        "num_blocks": blocks,
    }


# ---- the files by themselves


class _Tags(HTMLParser):
    """Every (tag, attributes) of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def read(name: str) -> str:
    return (PAGE_DIR / name).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def tags() -> list[tuple[str, dict[str, str | None]]]:
    return _Tags(read("index.html")).tags


@pytest.mark.parametrize("name", FILES)
def test_wheels_hold_the_file(name):
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    assert (PAGE_DIR / name).is_file()
    assert any(fnmatch(f"page/{name}", pattern) for pattern in setuptools["package-data"]["trainer.serve.http"])


@pytest.mark.parametrize("name", FILES)
def test_nothing_is_loaded_from_elsewhere(name):
    found = re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", read(name))
    assert set(found) <= {"http://www.w3.org/2000/svg"}  # a namespace's name, never fetched
    assert not re.search(r"@import|\bimport\s*[({\"']|url\(", read(name))


def test_ids_are_unique_and_every_reference_has_its_element(tags):
    ids = [attributes["id"] for _, attributes in tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    referred = set(re.findall(r'byId\("([\w-]+)"\)', read("app.js")))
    referred |= {f"{rate}{part}" for rate in ("generated", "prompt") for part in ("", "-peak", "-line", "-area")}
    referred |= set(re.findall(r"#([a-z][\w-]*)\s*[{,:]", read("style.css"))) - {"fff"}
    for _, attributes in tags:
        for name in ("for", "aria-labelledby", "aria-describedby"):
            referred |= set((attributes.get(name) or "").split())
    assert referred <= set(ids), referred - set(ids)
    assert len(referred) > 30  # the expressions above still find the references


def test_controls_have_names(tags):
    labels = {attributes.get("for") for tag, attributes in tags if tag == "label"}
    inside = re.findall(
        r"<label[^>]*>(?:(?!</label>).)*?<(?:input|select)[^>]*id=\"([\w-]+)\"", read("index.html"), re.S
    )
    controls = [attributes["id"] for tag, attributes in tags if tag in ("input", "select", "textarea")]
    assert len(controls) == 5 and set(controls) <= labels | set(inside)


def test_no_inline_script_and_no_markup_from_data(tags):
    script = read("app.js")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function|srcdoc", script)
    assert [attributes.get("src") for tag, attributes in tags if tag == "script"] == ["app.js"]
    assert "style" not in {tag for tag, _ in tags}
    assert not [name for _, attributes in tags for name in attributes if name.startswith("on") or name == "style"]
    policies = [about["content"] for _, about in tags if about.get("http-equiv") == "Content-Security-Policy"]
    assert len(policies) == 1 and "default-src 'none'" in policies[0] and "unsafe" not in policies[0]


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(
    "text, ground",
    [
        *(("ink", ground) for ground in ("ground", "panel", "mine")),
        *(("muted", ground) for ground in ("ground", "panel")),
        *(("accent", "panel"), ("on-accent", "accent"), ("bad", "bad-ground")),
    ],
)
def test_text_has_contrast_in_both_schemes(scheme, text, ground):
    blocks = re.findall(r":root \{(.*?)\}", read("style.css"), re.S)
    colours = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", blocks[scheme]))
    high, low = sorted((_luminance(colours[text]), _luminance(colours[ground])), reverse=True)
    assert (high + 0.05) / (low + 0.05) >= 4.5  # WCAG 2.2, 1.4.3, level AA


# ---- in a browser


@pytest.fixture
def open_page(browser):
    """Serves an engine and opens its page, once its first figures are there (`ready`). At the end nothing may have been
    written to the browser's console, but for what the test expects."""
    complaints, expected, addresses = [], [], {}
    with contextlib.ExitStack() as stack:  # closes pages before their server: they poll

        def open_(engine: BusyEngine, *, ready: bool = True, expect: tuple[str, ...] = (), **options: Any) -> Any:
            if engine not in addresses:
                addresses[engine] = stack.enter_context(serving(engine))
            context = browser.new_context(**options)
            stack.callback(context.close)
            expected.extend(expect)
            page = context.new_page()
            page.set_default_timeout(10_000)
            page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on("request", lambda request: complaints.extend(_elsewhere(request.url, addresses[engine])))
            page.goto(addresses[engine])
            if ready:
                page.locator("#live[data-ready]").wait_for()
            return page

        yield open_
    assert not [text for text in complaints if not any(part in text for part in expected)]


def _elsewhere(url: str, address: str) -> list[str]:
    return [] if url.startswith((address, "data:")) else [f"a request to {url}"]


@pytest.fixture
def engine(tokenizer, monkeypatch):
    monkeypatch.delenv("LOWBIT_API_KEY", raising=False)
    monkeypatch.setattr(tokenizer, "chat_template", CHATML)
    return BusyEngine(tokenizer, answer=ANSWER, max_model_len=2048)


def ask(page: Any, text: str) -> None:
    page.get_by_label("Message", exact=True).fill(text)
    page.keyboard.press("Enter")


def wait_for_answer(page: Any, number: int = 1) -> Any:
    """The number-th answer, once it is complete."""
    page.locator(".turn.model:not([aria-busy])").nth(number - 1).wait_for()
    return page.locator(".turn.model").nth(number - 1)


def test_an_answer_streams_in_as_text_and_the_conversation_goes_on(engine, open_page, tmp_path):
    page = open_page(engine)
    engine.step_s = 0.01
    ask(page, "Hello <i>there</i>")
    page.locator("tr", has_text="running").nth(2).wait_for()  # the page's own request among the others
    answer = wait_for_answer(page)
    assert answer.locator(".text").text_content() == ANSWER
    assert page.locator(".turn b, .turn i").count() == 0  # neither side's markup became elements
    num_prompt = len(engine.submitted[0].prompt)
    num_tokens = len(engine.tokenizer(ANSWER, add_special_tokens=False)["input_ids"]) + 1  # and the end token
    figures = answer.locator(".figures-line").text_content()
    assert re.fullmatch(
        rf"First token [\d.]+ m?s · [\d.]+ tokens/s · {num_tokens} tokens · 2 of {num_prompt} prompt tokens cached",
        figures,
    )
    speed = float(re.search(r"([\d.]+) tokens/s", figures)[1])
    assert 1 < speed <= 100  # a token each 10 ms at best
    ask(page, "More")
    wait_for_answer(page, 2)
    said = engine.tokenizer.decode(engine.submitted[1].prompt)
    assert ANSWER in said and said.count("<|im_start|>") == 4  # two questions, an answer, and the one to write
    assert engine.submitted[1].params.temperature == 0.7 and engine.submitted[1].params.max_tokens == 512
    page.screenshot(path=tmp_path / "page.png", full_page=True)
    assert (tmp_path / "page.png").stat().st_size > 20_000  # an empty page of this size takes about 5 kB
    page.get_by_role("button", name="New chat").click()
    ask(page, "Alone")
    wait_for_answer(page)
    assert engine.tokenizer.decode(engine.submitted[2].prompt).count("<|im_start|>") == 2


def test_blocks_and_requests_are_shown(engine, open_page):
    page = open_page(engine)
    counts = [page.locator(f"#count-{kind}").text_content() for kind in ("free", "cached", "shared", "owned")]
    assert counts == ["50", "5", "3", "6"]
    rows = page.locator("#requests tr")
    assert [rows.nth(at).locator("td").nth(1).text_content() for at in range(3)] == ["sql", "base", "base"]
    assert rows.nth(0).locator("td").nth(2).text_content() == "50 in, 10 of 40 out"
    assert rows.nth(2).locator("td").nth(2).text_content() == "0 of 50 in, 0 of 40 out"
    width = page.locator("#requests .prompt").nth(0).evaluate("bar => bar.style.width")
    assert abs(float(width.rstrip("%")) - 100 * 50 / 90) < 0.01  # CSS keeps about four digits
    swatches = page.locator("#requests .swatch").evaluate_all("all => all.map(one => one.style.background)")
    assert len(set(swatches)) == 3  # two that run, each its own, and none for the one that waits
    shown = {name: page.locator(f"#{name}").text_content() for name in ("ttft", "prefix", "preemptions", "drafts")}
    assert shown == {"ttft": "31 ms", "prefix": "25 %", "preemptions": "3", "drafts": "–"}
    assert page.locator("#generated").text_content() == "57" and page.locator("#prompt").text_content() == "1,234"
    page.locator("#generated-line[d*='L']").wait_for(state="attached")  # two polls make a line

    page.locator("#grid").hover(position={"x": 28 * 4 + 5, "y": 5})  # cells of 28 px: 64 blocks fit so
    readout = page.locator("#readout")
    assert readout.text_content() == "Block 4: held by alpha, sql, 7 blocks"
    page.locator("#grid").focus()
    page.keyboard.press("Home")
    assert readout.text_content() == "Block 0: a prefix that several sequences share"
    page.keyboard.press("End")
    assert readout.text_content() == "Block 63: free"


@pytest.mark.parametrize("num_blocks", [16, 8192])
@pytest.mark.parametrize("width", [360, 1400])
def test_every_block_is_drawn_and_the_page_fits(engine, open_page, num_blocks, width):
    """Read back from the canvas: as many pixels of each colour as there are blocks."""
    engine.num_blocks = num_blocks
    page = open_page(engine, viewport={"width": width, "height": 800}, color_scheme="light")
    page.locator("#grid").focus()
    page.keyboard.press("End")
    assert page.locator("#readout").text_content() == f"Block {num_blocks - 1:,}: free"
    page.locator("#grid").blur()
    height, right, painted = page.evaluate(
        """() => {
            const grid = document.getElementById("grid"), context = grid.getContext("2d");
            const pixels = context.getImageData(0, 0, grid.width, grid.height).data;
            const colours = {};
            for (let at = 0; at < pixels.length; at += 4)
                if (pixels[at + 3] === 255) {
                    const name = pixels.slice(at, at + 3).join();
                    colours[name] = (colours[name] ?? 0) + 1;
                }
            return [grid.clientHeight, document.documentElement.scrollWidth, colours];
        }"""
    )
    assert right <= width  # no sideways scrolling
    assert height <= 300
    cell = painted["43,48,57"] / 3  # pixels of a block: --block-shared, three of them
    assert cell >= 4  # 2 x 2 on a phone
    assert painted["235,236,232"] == cell * (num_blocks - 14)  # --block-free: all that nobody holds or cached


def test_nothing_moves_while_answers_and_figures_come(engine, open_page):
    """What Chromium counts as layout shifts, from the first paint on: none outside the two lists that grow."""
    engine.step_s = 0.005
    page = open_page(engine)
    ask(page, "Hello")
    wait_for_answer(page)
    page.locator("#requests tr").nth(3).wait_for(state="detached")
    shifts = page.evaluate(
        """() => new Promise(done => {
            const place = node => node.parentElement.closest("#log, #requests")?.id ?? node.textContent;
            const told = entries => entries.flatMap(entry => entry.sources.map(source => source.node));
            const observer = new PerformanceObserver(list =>
                done(told(list.getEntries()).filter(node => node?.parentElement).map(place)));
            observer.observe({type: "layout-shift", buffered: true});
            setTimeout(() => done([]), 1000);
        })"""
    )
    assert set(shifts) <= {"log", "requests"}
    assert "log" in shifts  # the figures below an answer move when it gets its second line: the measure works


def test_stop_ends_the_request_and_keeps_what_came(engine, open_page):
    engine.step_s, engine.answer = 0.02, "word " * 300
    page = open_page(engine)
    ask(page, "Talk")
    page.locator(".turn.model .text", has_text="word w").wait_for()
    page.get_by_role("button", name="Stop").click()
    answer = wait_for_answer(page)
    assert "stopped by you" in answer.locator(".figures-line").text_content()
    assert answer.locator(".text").text_content().startswith("word w")
    page.get_by_role("button", name="Send").wait_for()
    page.locator("#requests tr").nth(3).wait_for(state="detached")
    assert len(engine.aborted) == 1


def test_errors_say_what_to_do(engine, open_page):
    engine.config = ServeConfig(model="tiny", max_queue=1)
    engine.step_s, engine.answer = 0.05, "word " * 300
    refused = ("429 (Too Many Requests)", "400 (Bad Request)")  # the browser logs each itself
    page, other = open_page(engine, expect=refused), open_page(engine)
    ask(other, "Long")
    other.locator(".turn.model .text", has_text="w").wait_for()
    ask(page, "Me too")
    alert = page.get_by_role("alert")
    assert re.match(r"The server is full\. .*It says to try again in 3 seconds\.", alert.text_content())
    other.get_by_role("button", name="Stop").click()
    wait_for_answer(other)
    engine.step_s, engine.answer = 0.0, "now"
    page.get_by_role("button", name="Try again").click()
    assert wait_for_answer(page).locator(".text").text_content() == "now"
    page.get_by_label("Temperature").fill("3")
    ask(page, "Hot")
    assert "temperature=3" in page.get_by_role("alert").text_content()
    assert page.locator(".turn").count() == 4


def test_an_engine_that_fails_in_the_middle_is_an_error_on_the_page(engine, open_page):
    engine.step_s, engine.answer = 0.02, "word " * 300
    page = open_page(engine, expect=("ERR_CONNECTION_REFUSED",))  # the live view may ask once more
    ask(page, "Talk")
    page.locator(".turn.model .text", has_text="word w").wait_for()
    engine.fail()
    assert "the engine has failed" in page.get_by_role("alert").text_content()


def test_the_key_is_asked_for_and_kept_for_the_tab(engine, open_page):
    engine.config = ServeConfig(model="tiny", api_key="sesame")
    page = open_page(engine, ready=False, expect=("401 (Unauthorized)",))
    field = page.get_by_label("Key", exact=True)
    field.fill("wrong")
    page.keyboard.press("Enter")
    page.get_by_text("did not accept this key").wait_for()
    field.fill("sesame")
    page.keyboard.press("Enter")
    page.locator("#live[data-ready]").wait_for()
    ask(page, "Hello")
    assert wait_for_answer(page).locator(".text").text_content() == ANSWER
    stored = page.evaluate("[Object.values(sessionStorage), Object.values(localStorage), document.cookie]")
    assert stored == [["sesame"], [], ""]
    page.reload()
    page.locator("#live[data-ready]").wait_for()
    assert not page.locator("#key-dialog").is_visible()


def test_a_model_without_chat_template_continues_text(engine, open_page, monkeypatch):
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    page = open_page(engine)
    page.get_by_text("has no chat template").wait_for()
    ask(page, "Once upon")
    assert wait_for_answer(page).locator(".text").text_content() == ANSWER
    assert engine.tokenizer.decode(engine.submitted[0].prompt, skip_special_tokens=True) == "Once upon"


def test_adapters_that_come_later_can_be_chosen(engine, open_page):
    page = open_page(engine)
    engine.loaded["sql"] = "adapter"
    page.locator("#model option", has_text="sql (adapter on fake)").wait_for(state="attached")
    page.get_by_label("Model").select_option("sql")
    ask(page, "Hello")
    wait_for_answer(page)
    assert engine.submitted[0].adapter == "sql"


def test_hidden_tabs_do_not_poll(engine, open_page):
    asked = threading.Semaphore(0)
    state = engine.state
    engine.state = lambda: (asked.release(), state())[1]
    page = open_page(engine)
    for _ in range(3):
        assert asked.acquire(timeout=10)
    hide = "hidden => { Object.defineProperty(document, 'hidden', {value: hidden, configurable: true}); "
    hide += "document.dispatchEvent(new Event('visibilitychange')); }"
    page.evaluate(hide, True)
    page.wait_for_timeout(300)  # a poll under way may end
    while asked.acquire(blocking=False):
        pass
    page.wait_for_timeout(700)  # more than two polls' time
    assert not asked.acquire(blocking=False)
    page.evaluate(hide, False)
    assert asked.acquire(timeout=10)
