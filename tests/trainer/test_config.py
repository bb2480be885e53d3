import subprocess
import sys

import pytest

from trainer.compose import CONF_DIR, load_config, recipes, save_config
from trainer.config.errors import UserError
from trainer.config.schema import Config, to_dict
from trainer.settings import describe


@pytest.mark.parametrize("recipe", sorted(recipes()))
def test_every_recipe_composes_and_is_short(recipe):
    config = load_config(f"conf={recipe}")
    assert isinstance(config, Config)
    lines = (CONF_DIR / f"{recipe}.yaml").read_text().splitlines()
    assert len(lines) <= 30 and lines[0].startswith("# ") and lines[1] == f"# python train.py conf={recipe}"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["conf=qlorra"], ["qlorra", "qlora"]),
        (["conf=qlora", "model=smol"], ["smol", "smollm2_135m", "tiny"]),
        (["conf=qlora", "quant.blocksize=32"], ["quant.blocksize", "quant.block_size"]),
        (["conf=qlora", "quant.block_size=48"], ["quant.block_size=48", "64"]),
        (["conf=qlora", "lora.rank=0"], ["lora.rank=0", "at least 1"]),
        (["conf=qlora", "lora.rank=many"], ["lora.rank", "many", "Integer"]),
        (["conf=qlora", "optim.name=adam"], ["optim.name", "adamw_8bit"]),
        (["conf=qlora", "optim.lr=-1"], ["optim.lr=-1", "above 0"]),
        (["conf=qlora", "data=jsonl"], ["data.path", "data.path=<file"]),
        (["conf=qlora", "data=jsonl", "data.path=nowhere.jsonl"], ["data.path=nowhere.jsonl", "no file or folder"]),
        (["conf=qlora", "data.path=x.jsonl"], ["data.path=x.jsonl", "data=file"]),
        (["conf=qlora", "data.mix=[{path: x.jsonl}]"], ["data.mix: path=x.jsonl", "no file or folder"]),
        (["conf=qlora", "data.mix=[{source: pydocs}]"], ["data.mix beside data=pydocs", "add data=file"]),
        (["conf=qlora", "data=file", "data.mix=[{path: '-'}]"], ["path=-", "standard input"]),
        (["conf=qlora", "data.shuffle_buffer=9"], ["data.shuffle_buffer=9", "no effect"]),
        (["conf=qlora", "data=file", "data.path=.", "data.streaming=true"], ["data.streaming=true", "train.max_steps"]),
        (["conf=qlora", "model=hub"], ["model.path", "org/name"]),
        (["conf=qlora", "model=folder", "model.path=nowhere"], ["model.path=nowhere", "not a folder"]),
        (["conf=qlora", "model=folder", "model.path=."], ["model.path=.", "config.json"]),
        (["conf=qlora", "model=gguf", "model.path=x.gguf"], ["model.path=x.gguf", "not a file"]),
        (["conf=qlora", "model=tiny", "model.path=x"], ["model.path=x", "no effect"]),
        (["conf=qlora", "train.batch_size=0"], ["train.batch_size=0", "at least 1"]),
        (["conf=qlora", "train.epochs=0"], ["train.epochs=0", "above 0"]),
        (["conf=qlora", "data.packing=true", "data.group_by_length=true"], ["data.packing=true", "no effect"]),
        (["conf=qlora", "export.formats=[gguff]"], ["export.formats", "gguff", "adapter"]),
        (["conf=qlora", "tracker=mlflow"], ["tracker", "mlflow", "wandb"]),
        (["conf=qlora", "seed=-1"], ["seed=-1"]),
        (["model=tiny"], ["conf", "qlora"]),
        (["conf=qlora", "+lora.rnak=4"], ["lora.rnak", "lora.rank"]),
        (["conf=qlora", "rank=8"], ["rank", "lora.rank"]),
        (["conf=qlora", "model=Qwen/Qwen2"], ["model=hub", "model.path=Qwen/Qwen2"]),
        (["conf=qlora", "data=mine.jsonl"], ["data=file", "data.path=mine.jsonl"]),
        (["conf=qlora", "optim.lr=inf"], ["optim.lr=inf"]),
        (["conf=qlora", "model=tiny", "model.revision=x"], ["model.revision=x", "no effect"]),
        (["resume=nowhere"], ["resume=nowhere", "config.yaml"]),
    ],
)
def test_a_mistake_is_answered_with_what_where_and_next(overrides, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as caught:
        load_config(*overrides)
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_mistakes_are_answered_without_torch():
    """The first second: torch, transformers and peft take several to import."""
    code = "import sys, trainer; trainer.load_config('conf=qlora'); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_help_names_every_key():
    text = describe(Config())
    for section in to_dict(Config()).items():
        keys = [f"{section[0]}.{key}" for key in section[1]] if isinstance(section[1], dict) else [section[0]]
        assert all(key in text for key in keys)


def make_run(tmp_path, *overrides):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    save_config(load_config("conf=qlora", "model=tiny", *overrides), run_dir / "config.yaml")
    return run_dir


def test_resume_takes_the_config_of_the_run(tmp_path):
    run_dir = make_run(tmp_path, "lora.rank=3", "train.max_steps=7")
    config = load_config(f"resume={run_dir}", "train.max_steps=9")
    assert (config.lora.rank, config.train.max_steps, config.output_dir) == (3, 9, str(run_dir))


def test_resume_with_the_whole_command_again(tmp_path):
    run_dir = make_run(tmp_path, "lora.rank=3")
    assert load_config("conf=qlora", "model=tiny", "lora.rank=3", f"resume={run_dir}").lora.rank == 3


@pytest.mark.parametrize(
    "override",
    [
        "train.max_step=3",
        "model=hub",
        "seed=5",
        "lora.rank=4",
        "train.batch_size=2",
        "optim.lr=0.5",
        "data.max_seq_len=99",
    ],
)
def test_resume_refuses_what_would_not_continue_the_run(tmp_path, override):
    run_dir = make_run(tmp_path)
    with pytest.raises(UserError, match=override.partition("=")[0]):
        load_config(f"resume={run_dir}", override)


def test_resume_latest_is_the_newest(tmp_path, monkeypatch):
    import os

    monkeypatch.chdir(tmp_path)
    for age, name in ((100, "old"), (50, "new"), (200, "older")):
        run_dir = tmp_path / "outputs" / "qlora" / name
        run_dir.mkdir(parents=True)
        save_config(load_config("conf=qlora", "model=tiny"), run_dir / "config.yaml")
        for path in (run_dir / "config.yaml", run_dir):
            stamp = path.stat().st_mtime - age
            os.utime(path, (stamp, stamp))
    assert load_config("resume=latest").output_dir.endswith("outputs/qlora/new")
