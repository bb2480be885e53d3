"""EleutherAI's lm-evaluation-harness over HTTP beside its own transformers backend: the same scores, or exit code 1.

    python scripts/eval_lm_harness.py --tasks arc_easy,gsm8k --limit 50 [--include-path DIR] [--model smollm2_135m]
                                      [--lm-eval-python PATH] [--out DIR]

The harness runs unchanged: its `local-completions` model asks our server, its `hf` model computes the truth in
float32. It is `pip install 'lm-eval[api]'`, in this environment or in one that is named with --lm-eval-python or
LOWBIT_LM_EVAL_PYTHON. Tasks of one's own are a folder of YAML files, --include-path. Last line: JSON.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

NOISE = 1e-3
"""Largest difference between two sums of float32 log-probabilities, some 100 tokens long and up to 1,000 in size, that
were computed in another order."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", required=True, help="comma-separated task names")
    parser.add_argument("--include-path", default="", help="folder with tasks of one's own")
    parser.add_argument("--limit", type=int, help="items a task")
    parser.add_argument("--model", default="smollm2_135m", help="smollm2_135m or a Hugging Face folder")
    parser.add_argument("--lm-eval-python", default=os.environ.get("LOWBIT_LM_EVAL_PYTHON", sys.executable))
    parser.add_argument("--out", type=Path, help="folder for eval_lm_harness.json")
    args = parser.parse_args()
    folder = _model_folder(args.model)
    with tempfile.TemporaryDirectory() as results:
        process, url = _start(args.model)
        try:
            where = f"model=served,base_url={url}/v1/completions,tokenizer={folder},num_concurrent=4"
            _evaluate(args, "local-completions", where, Path(results, "served"))
        finally:
            process.send_signal(signal.SIGTERM)
            process.communicate()
        _evaluate(args, "hf", f"pretrained={folder},dtype=float32", Path(results, "hf"))
        rows = [row for task in _samples(Path(results, "hf")) for row in _compare(task, Path(results))]
    for row in rows:
        print(row)
    report = {"name": "eval_lm_harness", "model": args.model, "rows": rows}
    if args.out:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "eval_lm_harness.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report))
    sys.exit(not rows or any(not row["equal"] for row in rows))


def _model_folder(model: str) -> Path:
    if model != "smollm2_135m":
        return Path(model)
    from trainer.sources.bundled import bundled_model

    return bundled_model()


def _start(model: str) -> tuple[subprocess.Popen, str]:
    settings = ("served_model_name=served", "dtype=float32", "quantization=none", "port=0")
    command = [sys.executable, "-m", "trainer.serve", f"model={model}", *settings]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if found := re.search(r"http://\S+:\d+", line):
            return process, found[0]
    raise SystemExit(f"the server did not start: {''.join(lines)}")


def _evaluate(args: argparse.Namespace, backend: str, where: str, results: Path) -> None:
    command = [args.lm_eval_python, "-m", "lm_eval", "--model", backend, "--model_args", where, "--tasks", args.tasks]
    command += ["--batch_size", "4" if backend == "local-completions" else "1", "--device", "cpu", "--seed", "0"]
    command += ["--log_samples", "--output_path", str(results)]
    command += ["--include_path", args.include_path] if args.include_path else []
    command += ["--limit", str(args.limit)] if args.limit else []
    subprocess.run(command, check=True)


def _samples(results: Path) -> dict[str, dict[int, dict]]:
    """Task -> number of the item -> what was asked and answered."""
    found = {}
    for path in sorted(results.rglob("samples_*.jsonl")):
        task = re.fullmatch(r"samples_(.+)_\d{4}-.*", path.stem)[1]
        items = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        found[task] = {item["doc_id"]: item for item in items}
    return found


def _compare(task: str, results: Path) -> list[dict]:
    """One row a metric: both scores, and how far the answers they were made from differ."""
    served, truth = (_samples(results / side)[task] for side in ("served", "hf"))
    assert served.keys() == truth.keys()
    pairs = [
        (ours[0], theirs[0])
        for item in truth
        for ours, theirs in zip(served[item]["resps"], truth[item]["resps"], strict=True)
    ]
    scored = isinstance(pairs[0][0], list)  # (log-likelihood, is greedy); a text where it was generated
    largest = max(abs(float(ours[0]) - float(theirs[0])) for ours, theirs in pairs) if scored else None
    same = sum(str(ours[1]) == str(theirs[1]) if scored else ours == theirs for ours, theirs in pairs)
    rows = []
    for metric in next(iter(truth.values()))["metrics"]:
        scores = [sum(float(item[metric]) for item in side.values()) / len(side) for side in (served, truth)]
        equal = scores[0] == scores[1] and same == len(pairs) and (largest is None or largest < NOISE)
        rows.append(
            {"task": task, "metric": metric, "served": scores[0], "hf": scores[1], "answers": len(pairs)}
            | {"largest_loglikelihood_difference": largest, "same_flags_or_texts": same, "equal": equal}
        )
    return rows


if __name__ == "__main__":
    main()
