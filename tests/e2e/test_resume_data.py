"""Exact resume through all that gives rows an order: packing, mixes, lengths, streams, at any step of any epoch.

Each drawn run is trained whole; then it loses what it did after a drawn step, as a kill leaves it, and goes on. Losses
and row ids must be those of the first time, to the last bit.
"""

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st

from tests.e2e.conftest import ROOT, environment, losses
from tests.e2e.test_resume import start, wait_for_step
from trainer import UserError, finetune, load_config

EXAMPLES = int(os.environ.get("LOWBIT_RESUME_EXAMPLES", "6"))
"""Drawn runs; a soak sets more. docs/data.md has the command of a long one."""
COMMON = (
    *("conf=qlora", "model=tiny", "data=file", "data.max_seq_len=96", "evaluate.samples=0", "train.log_row_ids=true"),
    *("train.save_every=1", "train.keep_checkpoints=99", "data.eval_rows=3", "data.on_bad_row=skip"),
)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Three files of different sizes; the first has a bad row, the pairs' columns are in all."""
    folder = tmp_path_factory.mktemp("sources")
    for name, number in (("a", 13), ("b", 7), ("c", 4)):
        rows = [
            {"prompt": f"{name}: add {i} and {i}" + "!" * (i % 9), "completion": f"{2 * i}" * (1 + i % 11)}
            for i in range(number)
        ]
        for row in rows:
            row |= {"chosen": row["completion"], "rejected": row["completion"] + "?"}
        if name == "a":
            rows.insert(5, {**rows[0], "completion": "", "chosen": ""})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@st.composite
def runs(draw):
    """Overrides of a run of at least two epochs, and its number of steps."""
    steps = draw(st.integers(6, 12))
    overrides = [
        f"train.max_steps={steps}",
        f"train.batch_size={draw(st.integers(1, 4))}",
        f"seed={draw(st.integers(0, 9))}",
    ]
    overrides.append(f"train.grad_accum_steps={draw(st.integers(1, 2))}")
    layout = draw(st.sampled_from(("plain", "packing", "group_by_length")))
    overrides += [] if layout == "plain" else [f"data.{layout}=true"]
    overrides.append(draw(st.sampled_from(("lora.dropout=0", "lora.dropout=0.3"))))
    if draw(st.booleans()):
        overrides += ["optim.name=adamw_8bit", "lora.rank=64"]  # below 4096 values bitsandbytes keeps float32
    if draw(st.booleans()):
        overrides += ["preference.method=dpo"]
    if draw(st.booleans()):
        overrides += ["data.streaming=true", f"data.shuffle_buffer={draw(st.integers(2, 30))}"]
    weights = draw(st.sampled_from(((1, 1, 1), (5, 2, 1), (1, 1, 8))))
    match draw(st.sampled_from(("one", "concatenated", "weights", "epochs"))):
        case "one":
            overrides.append("data.path={a}")
        case "concatenated":
            overrides.append("data.mix=[{{path:{a}}},{{path:{b}}},{{path:{c}}}]")
        case "weights":
            parts = ",".join(
                f"{{{{path:{{{name}}},weight:{weight}}}}}" for name, weight in zip("abc", weights, strict=True)
            )
            overrides += [f"data.mix=[{parts}]", f"data.mix_until={draw(st.sampled_from(('all', 'first')))}"]
            overrides.append(f"data.mix_temperature={draw(st.sampled_from((1, 2)))}")
        case "epochs":
            overrides.append("data.mix=[{{path:{a},epochs:1}},{{path:{c},epochs:2}}]")
    return overrides, steps


def lines(run_dir):
    found = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: (line["loss"], line["grad_norm"], line["row_ids"]) for line in found}


def forget_after(run_dir, step):
    """What a kill before the next checkpoint leaves."""
    for path in (run_dir / "checkpoints").iterdir():
        if int(path.name.removeprefix("step_")) > step:
            shutil.rmtree(path)
    (run_dir / "metrics.json").unlink()


@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize="LOWBIT_RESUME_EXAMPLES" not in os.environ,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(run=runs(), place=st.floats(0, 1))
def test_a_run_that_lost_its_end_sees_the_same_rows_again(run, place, files, tmp_path_factory):
    overrides, steps = run
    paths = {name: files / f"{name}.jsonl" for name in "abc"}
    overrides = [*COMMON, *(item.format(**paths) if item.startswith("data.") else item for item in overrides)]
    step = 1 + int(place * (steps - 2))
    note(f"{' '.join(overrides)} lost after step {step}")
    run_dir = tmp_path_factory.mktemp("run")
    finetune(load_config(*overrides, f"output_dir={run_dir}"))
    whole = lines(run_dir)
    assert len(whole) == steps and len({str(row_ids) for _, _, row_ids in whole.values()}) > 1
    forget_after(run_dir, step)
    finetune(load_config(f"resume={run_dir}"))
    assert lines(run_dir) == whole


def test_a_killed_stream_with_workers_goes_on(tmp_path, files):
    """A real kill, workers and all, in the second pass; and with other workers it is the same run."""
    paths = {name: files / f"{name}.jsonl" for name in "abc"}
    mix = "data.mix=[{{path:{a},weight:3}},{{path:{b},weight:1}}]".format(**paths)
    settings = (*COMMON, mix, "data.streaming=true", "data.shuffle_buffer=9", "data.packing=true", "lora.dropout=0.2")
    settings = (*settings, "train.max_steps=400", "train.batch_size=1", "optim.schedule=constant")
    settings = (*settings, "optim.warmup_ratio=0")  # or it would depend on the number of steps
    run_dir = tmp_path / "killed"
    process = start(tmp_path, *settings, "data.num_workers=2", f"output_dir={run_dir}")
    wait_for_step(run_dir, 12, process)
    process.send_signal(signal.SIGKILL)
    process.wait()
    done = max(lines(run_dir))
    assert done < 400, "the run ended before the kill"
    finetune(load_config(f"resume={run_dir}", f"train.max_steps={done + 3}", "data.num_workers=0"))
    whole = tmp_path / "whole"
    finetune(load_config(*settings, f"train.max_steps={done + 3}", f"output_dir={whole}"))
    assert losses(run_dir) == losses(whole) and lines(run_dir) == lines(whole)


def test_changed_rows_of_a_stream_are_refused(tmp_path, files):
    path = tmp_path / "rows.jsonl"
    shutil.copy(files / "b.jsonl", path)
    settings = (*COMMON, f"data.path={path}", "data.streaming=true", "data.shuffle_buffer=4", "train.batch_size=2")
    run_dir = finetune(load_config(*settings, "train.max_steps=3", f"output_dir={tmp_path / 'run'}")).run_dir
    path.write_text(path.read_text().replace("add", "sum"))
    with pytest.raises(UserError, match="changed"):
        finetune(load_config(f"resume={run_dir}", "train.max_steps=5"))


def test_processes_share_a_stream_and_go_on(tmp_path, files):
    """Each row of a pass is one process's, once; both go on where they were."""
    run_dir = tmp_path / "run"
    settings = (*COMMON, f"data.path={files / 'a.jsonl'}", "data.streaming=true", "data.shuffle_buffer=4")
    settings = (*settings, "train.batch_size=1", "train.max_steps=8", f"output_dir={run_dir}")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(ROOT / "train.py"),
    ]

    def train(*overrides: str) -> None:
        both = {**environment(), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        done = subprocess.run([*launch, *overrides], cwd=tmp_path, env=both, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr

    train(*settings)
    whole = lines(run_dir)
    forget_after(run_dir, 3)
    train(f"resume={run_dir}")
    assert lines(run_dir) == whole
    seen = [row for _, _, row_ids in whole.values() for row in row_ids]
    places = sorted({int(row.rpartition(":")[2]) for row in seen})
    # Line 6 is the bad row, lines 1 to 3 are held out; ten rows are left, and 16 are taken.
    assert len(seen) == 16 and places == [4, 5, 7, 8, 9, 10, 11, 12, 13, 14]
    assert max(seen.count(row) for row in seen) == 2
