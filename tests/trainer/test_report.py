import ast
import json
import logging
import math
import re
import shutil
import sys
from html import unescape
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import trainer.leave_report as leaving
from trainer import UserError, finetune, load_config
from trainer.compose import save_config
from trainer.config.schema import Tracker
from trainer.evaluate.report import plots
from trainer.evaluate.report.answers import compared, shared_words
from trainer.evaluate.report.charts import MAX_BUCKETS, Series, line_chart, smoothed, thinned
from trainer.evaluate.report.comparing import compare
from trainer.evaluate.report.gather import gather
from trainer.evaluate.report.origin import shown
from trainer.evaluate.report.page import report_page, write_report
from trainer.evaluate.report.scales import Scale, duration, number
from trainer.metrics import WandbSink, open_sinks
from trainer.page.text import visible

ROOT = Path(__file__).parent.parent.parent
NASTY = "</script><img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>&\u202e"
STEPS = 300


def record() -> dict:
    stretches = [
        {"text": f"ask {NASTY}", "is_target": False, "num_tokens": 3},
        {"text": "learned words", "is_target": True, "num_tokens": 2},
    ]
    source = {"description": NASTY, "source_rows": 12, "rows": 10, "tokens": 100, "trained_tokens": 40}
    return {
        "answers": [
            {"prompt": NASTY, "reference": "r", "base": f"one two {NASTY}", "tuned": "one two three"},
            {"prompt": "p", "reference": "r", "base": None, "tuned": "only tuned"},
        ],
        "data": {
            "rows": 10,
            "held_out_rows": 2,
            "streamed": False,
            "copies": 1,
            "sources": {NASTY: source},
            "bad": {NASTY: 2},
            "lengths": [[0, 8, 3], [8, 16, 7]],
            "examples": [{"origin": NASTY, "documents": [{"title": "", "stretches": stretches}]}],
        },
    }


def load_rows() -> list[dict]:
    spread = {"mean": 30.0, "p50": 20.0, "p90": 80.0, "p99": 200.0, "max": 210.0}
    rows = [
        {
            **{"work": "load", "server": name, "load": f"{rate:g}", "rate": rate, "requests": 9, "completed": 9},
            **{"requests_per_s": rate, "output_tokens_per_s": 100 * rate, "goodput": 0.9},
            **dict.fromkeys(("ttft_ms", "tpot_ms", "e2e_ms"), spread),
        }
        for name in ("ours", NASTY)
        for rate in (1.0, 2.0, 4.0)
    ]
    unanswered = {"work": "load", "server": "down", "load": "none", "rate": None, "requests": 1, "completed": 0}
    return [*rows, unanswered, {"work": "load_sustained", "server": "ours", "rate": 4.0}]


@pytest.fixture
def run_dir(tmp_path):
    """A run folder with everything that a report shows, hostile wherever text comes from."""
    folder = tmp_path / "run"
    (folder / "checkpoints" / "step_300").mkdir(parents=True)
    (folder / "export" / "merged").mkdir(parents=True)
    config = load_config("conf=qlora", "model=tiny", "seed=3")
    config.project = NASTY
    save_config(config, folder / "config.yaml")
    lines = [
        {"step": step, "loss": 3 + math.sin(step), "lr": 1e-4, "grad_norm": math.nan if step == 7 else 1.0}
        | {"tokens": step, "tokens_per_s": 500.0, "peak_memory_bytes": step << 20}
        | ({"eval_loss": 2.5} if step % 100 == 0 else {})
        for step in range(1, STEPS + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 301, "lo')
    interval = {"value": 0.08, "low": 0.06, "high": 0.1}
    metrics = {"steps": STEPS, "wall_s": 61.0, "eval_loss_base": 3.5, "eval_loss": 2.25, "perplexity_base": 33.1}
    metrics |= {"perplexity": 9.49, "eval_rows": 2, "eval_tokens": 20, "tokens": 300, "tokens_per_s": 500.0}
    metrics |= {"peak_memory_bytes": 2**30, "fidelity": {"compared": NASTY, "tokens": 99, "kl": interval, "same": 0.9}}
    layer = {"name": NASTY, "codebook": "nf4", "rank": 4, "weight_norm": 2.0, "error_plain": 0.2, "error": 0.1}
    files = {
        "metrics.json": metrics,
        "report.json": record(),
        "load.json": {"name": "bench_load", "rows": load_rows()},
        "loftq.json": {"layers": [{**layer, "ratio": 0.5}, {**layer, "weight_norm": 0.0, "ratio": 0.5}]},
        "blockwise.json": {"blocks": [{"index": i, "error_before": 0.2, "error_after": 0.1} for i in range(3)]},
        "checkpoints/step_300/state.json": {"data_sha256": "d" * 64, "base_sha256": "b" * 64},
        "export/merged/lowbit.json": {"merged": {"update_survived": 0.9, "layers": {NASTY: 0.4, "b": 0.6}}},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    session = {"began": "2026-01-31", "step": 0, "command": f"python train.py {NASTY}", "versions": {"torch": "2"}}
    (folder / "sessions.jsonl").write_text(json.dumps({**session, "machine": "m"}) + "\n")
    (folder / "bad_rows.jsonl").write_text(json.dumps({"where": "a.jsonl:3", "kind": "k", "what": NASTY}) + "\n")
    return folder


# ---- numbers, axes, lines


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2.5891, "2.589"),
        (12345.6, "12,346"),
        (1.2e-5, "1.2e-5"),
        (math.inf, "∞"),
        (math.nan, "–"),
        (None, "–"),
    ],
)
def test_numbers_are_as_people_write_them(value, text):
    assert number(value) == text


def test_durations():
    assert [duration(each) for each in (0.5, 59.7, 205, 7500)] == ["0.5 s", "1 min 0 s", "3 min 25 s", "2 h 5 min"]


finite = st.floats(-1e12, 1e12, allow_nan=False)


@given(st.lists(finite, min_size=1, max_size=20), st.booleans())
def test_a_scale_holds_its_values_and_its_ticks(values, log):
    scale = Scale.of(values, log=log)
    assert all(-1e-6 <= scale.share(value) <= 1 + 1e-6 for value in [*values, *scale.ticks()])
    assert len(scale.ticks()) <= 7


def test_a_log_scale_has_round_ticks():
    assert Scale.of([12, 900], log=True).ticks() == [20, 50, 100, 200, 500, 1000]
    assert not Scale.of([0, 900], log=True).log


@given(st.lists(finite, min_size=1, max_size=4000))
def test_a_thinned_line_keeps_its_ends_and_extremes(values):
    points = list(enumerate(values))
    kept = thinned(points)
    assert len(kept) <= 4 * MAX_BUCKETS and kept == sorted(kept)
    assert {points[0], points[-1]} <= set(kept)
    assert {min(values), max(values)} <= {y for _, y in kept}


def test_a_smoothed_line_is_straight_where_the_line_is():
    line = [(x, 2.0 * x) for x in range(100)]
    assert [y for _, y in smoothed(line)] == pytest.approx([y for _, y in line])


def test_a_gap_breaks_the_line_and_nothing_gives_no_chart():
    chart = line_chart("t", [Series("s", [(0, 1), (1, 2), (2, math.nan), (3, 4), (4, math.inf), (5, 1), (6, 2)])])
    assert re.search(r'class="line c0" d="([^"]*)"', chart)[1].count("M") == 3
    assert "nan" not in chart and "inf" not in chart
    assert line_chart("t", [Series("s", [(0, math.nan)])]) == ""


@given(st.text(max_size=60), st.text(max_size=60))
def test_marking_what_differs_loses_no_text_and_adds_no_markup(base, tuned):
    for html, text in zip(compared(base, tuned), (base, tuned), strict=True):
        plain = re.sub(r'<mark class="(gone|new)">|</mark>', "", html)
        assert "<" not in plain and unescape(plain) == visible(text)


def test_what_differs_is_marked():
    left, right = compared("the sky is blue", "the sky is red now")
    assert left == 'the sky is <mark class="gone">blue</mark>'
    assert re.sub("</mark>|<mark[^>]*>", "", right) == "the sky is red now" and '<mark class="new">red' in right
    assert shared_words("the sky is blue", "the sky is red now") == 3


# ---- the page


def test_the_page_says_everything_and_loads_nothing(run_dir):
    page = write_report(run_dir).read_text()
    for words in (
        *(
            "Before and after",
            "Fidelity",
            "0.06 to 0.1",
            "Layer by layer",
            "Under load",
            "Rows as the model reads them",
        ),
        *("How to repeat it", "d" * 64, "b" * 64, "a.jsonl:3", "<mark>learned words</mark>", "-1.2500"),
    ):
        assert words in page, words
    assert "<img" not in page and "<script" not in page and "\u202e" not in page
    assert not re.search(r"https?://|@import|url\(|\bsrc=[\"']|<link", unescape(page).replace(NASTY[:-1], ""))
    assert not list(run_dir.glob(".*"))


def test_settings_that_are_not_the_default_come_first(run_dir):
    changed = gather(run_dir).changed()
    assert changed["seed"] == (3, 0) and changed["project"] == (NASTY, "lowbit") and "optim.name" not in changed


FILES = (
    *("config.yaml", "metrics.jsonl", "metrics.json", "report.json", "sessions.jsonl", "bad_rows.jsonl", "load.json"),
    *("loftq.json", "blockwise.json", "checkpoints/step_300/state.json", "export/merged/lowbit.json"),
)


@pytest.mark.parametrize("name", FILES)
def test_any_file_may_be_absent_or_broken(run_dir, name):
    whole = report_page(gather(run_dir))
    for content in ("[1, 2", "[]", "{}", "a: [", "\x00"):
        (run_dir / name).write_text(content)
        assert "<h1>" in report_page(gather(run_dir))
    (run_dir / name).unlink()
    assert len(report_page(gather(run_dir))) < len(whole)


def test_a_run_that_was_stopped_has_a_report_too(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert "1 steps so far" in report_page(gather(tmp_path))


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "null"), (True, "true"), (1, "1"), (["adapter", "merged"], "[adapter,merged]"), ("a", "a")],
)
def test_settings_are_written_as_one_types_them(value, text):
    assert shown(value) == text


def test_a_resumed_run_has_a_session_more(run):
    folder = run("run", "train.max_steps=1").run_dir
    finetune(load_config(f"resume={folder}", "train.max_steps=2"))
    assert [session["step"] for session in gather(folder).sessions] == [0, 1]
    assert "from step 1" in (folder / "report.html").read_text()


def test_what_is_no_run_is_said(tmp_path):
    with pytest.raises(UserError, match="no run folder"):
        gather(tmp_path)


def test_plots_are_drawn_where_matplotlib_is(run_dir):
    pytest.importorskip("matplotlib", reason="draws the plots: pip install matplotlib")
    drawn = plots.write_plots(run_dir)
    assert {path.name for path in drawn} >= {"loss.png", "memory.png"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_without_matplotlib_there_are_no_plots(run_dir, monkeypatch):
    monkeypatch.setattr(plots, "find_spec", lambda name: None)
    assert plots.write_plots(run_dir) == [] and not (run_dir / "plots").exists()


def test_no_module_imports_matplotlib_or_wandb_before_it_is_needed():
    for path in ROOT.glob("trainer/**/*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & {"matplotlib", "wandb"}, path


# ---- in a browser


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_offline_and_runs_nothing(browser, run_dir, scheme):
    path, complaints, requests = write_report(run_dir), [], []
    tab = browser.new_page(color_scheme=scheme, offline=True, viewport={"width": 420, "height": 800})
    tab.on("console", lambda message: complaints.append(message.text))
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: requests.append(request.url))
    tab.goto(f"file://{path}")
    assert tab.title().startswith("tiny: ") and tab.locator("img, script").count() == 0
    assert requests == [f"file://{path}"] and not complaints
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert tab.locator("figure.chart").count() >= 10
    red, green, blue = map(int, re.findall(r"\d+", tab.evaluate("getComputedStyle(document.body).backgroundColor"))[:3])
    assert (red + green + blue > 600) == (scheme == "light")
    assert tab.locator("figure.chart").first.locator(".strip title").first.text_content().startswith("step 0")
    assert tab.locator("figure.chart svg path.line").first.bounding_box()["width"] > 100
    assert tab.locator("svg.interval .whisker").first.bounding_box()["width"] > 20
    tab.get_by_text("All settings").click()
    assert tab.locator("details:has-text('All settings') td", has_text="optim.name").first.is_visible()
    tab.close()


# ---- runs beside each other


def test_runs_are_compared(run_dir, tmp_path):
    other = shutil.copytree(run_dir, tmp_path / "other")
    metrics = json.loads((other / "metrics.json").read_text())
    (other / "metrics.json").write_text(json.dumps({**metrics, "eval_loss": 2.0, "perplexity": math.inf}))
    save_config(load_config("conf=qlora", "model=tiny", "seed=4"), other / "config.yaml")
    found = compare([run_dir, other])
    rows = {row.label: row for row in found.rows}
    tuned = rows["loss, nats a target token, tuned"]
    assert tuned.values == [2.25, 2.0] and tuned.best() == 1 and tuned.change(1) == "-11.1 %"
    assert rows["steps"].best() is None and rows["tokens/s"].best() is None  # equal
    assert found.settings["seed"] == [3, 4] and "optim.name" not in found.settings
    assert found.as_dict()["runs"][1]["figures"]["perplexity, tuned"] is None
    json.dumps(found.as_dict(), allow_nan=False)
    with pytest.raises(UserError, match="at least two"):
        compare([run_dir, run_dir])


# ---- the end of a run, and its tracker


def test_a_run_leaves_its_report(run):
    folder = run("run", "train.max_steps=2", "evaluate.samples=1", "evaluate.max_new_tokens=4").run_dir
    page = (folder / "report.html").read_text()
    assert "2 steps over" in page and "Answers to held-out prompts" in page and "uneven.jsonl" in page
    data = json.loads((folder / "report.json").read_text())["data"]
    assert data["rows"] + data["held_out_rows"] == 24
    learned = [part for part in data["examples"][0]["documents"][0]["stretches"] if part["is_target"]]
    assert re.match(r"\d+", learned[0]["text"])
    session = json.loads((folder / "sessions.jsonl").read_text())
    assert session["command"] is None and "torch" in session["versions"]  # started from Python


def test_a_full_disk_does_not_cost_the_run(run, monkeypatch, caplog):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(leaving, "write_report", full)
    with caplog.at_level(logging.WARNING):
        result = run("run", "train.max_steps=1")
    assert (result.run_dir / "metrics.json").is_file() and not (result.run_dir / "report.html").exists()
    assert "No space left" in caplog.text and "scripts/report.py" in caplog.text


class WandbError(Exception):
    """As wandb's own: a class of its own, below Exception."""


def stub(**functions) -> SimpleNamespace:
    return SimpleNamespace(Error=WandbError, Settings=dict, Artifact=None, **functions)


def failing(error: Exception):
    def fail(*_, **__):
        raise error

    return fail


FAULTS = [WandbError("no login"), ConnectionError("no network"), TimeoutError("slow"), RuntimeError("broken")]


@pytest.mark.parametrize("wandb", [None, *(stub(init=failing(error)) for error in FAULTS)])
def test_a_tracker_that_cannot_start_is_one_warning(wandb, tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", wandb)  # None: the import fails
    config = load_config("conf=qlora", "model=tiny", "tracker=wandb")
    sinks = open_sinks(config, tmp_path, keep_steps=0)
    for sink in sinks:
        sink.log({"step": 1, "loss": 2.0})
        sink.add_report(tmp_path / "report.html")
        sink.close()
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "loss": 2.0}
    assert len(caplog.records) == 1 and "wandb cannot start" in caplog.text


def test_a_tracker_that_breaks_on_the_way_is_given_up(tmp_path, monkeypatch, caplog):
    broken = SimpleNamespace(id="a", log=failing(WandbError("gone")), finish=failing(AssertionError("not called")))
    monkeypatch.setitem(sys.modules, "wandb", stub(init=lambda **_: broken))
    sink = WandbSink(load_config("conf=qlora", "model=tiny", "tracker=wandb"), tmp_path)
    for step in (1, 2):
        sink.log({"step": step})
    sink.close()
    assert len(caplog.records) == 1 and "wandb cannot log (WandbError: gone)" in caplog.text


def test_our_own_bugs_are_not_taken_for_the_trackers(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", stub(init=failing(AssertionError("ours"))))
    with pytest.raises(AssertionError, match="ours"):
        WandbSink(load_config("conf=qlora", "model=tiny", "tracker=wandb"), tmp_path)


def test_a_run_goes_on_without_its_tracker(run, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "wandb", stub(init=failing(ConnectionError("no network"))))
    result = run("run", "train.max_steps=1", f"tracker={Tracker.wandb}")
    assert (result.run_dir / "report.html").is_file()
    assert caplog.text.count("wandb cannot") == 1
