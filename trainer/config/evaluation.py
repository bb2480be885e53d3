"""EvaluationConfig: what `python scripts/evaluate.py` accepts as key=value."""

from dataclasses import dataclass, field
from pathlib import Path

from trainer.config.errors import require
from trainer.config.model import named_model

PATHS = ("server", "module", "transformers", "llama_cpp")
DTYPES = ("auto", "bfloat16", "float32")


@dataclass
class EvaluationConfig:
    """What quantization and training cost: some models beside the one that they were made from."""

    run: str = ""
    """What is evaluated, comma-separated: a run folder, what quantize.py wrote, an export folder (lowbit's, GPTQ, AWQ,
    compressed-tensors, bitsandbytes), a .gguf file, or a model as `model=` knows it. `<name>@llama_cpp` computes this
    one another way than `path`."""
    against: str | None = None
    """The original: the same kinds. null: what the first of `run` was made from, where its folder says that."""
    path: str = "server"
    """What computes: server (the engine of `python -m trainer.serve`), module (our layers, as training calls them),
    transformers (its own loader and modules) or llama_cpp (.gguf files; the original is written as one)."""
    against_path: str | None = None
    """The same for the original; null for `path`, and server beside llama_cpp."""
    dtype: str = "auto"
    """auto, bfloat16 or float32 of what is not quantized; auto as in training."""

    text: str | None = None
    """Text file for perplexity and KL; null for docstrings of the standard library that pydocs holds out."""
    windows: int = 16
    """Pieces of the text, from its start, each read without what stands before it."""
    window: int = 512
    """Tokens of a piece."""
    bos: bool | None = None
    """Put the tokenizer's first token before each piece; null as the tokenizer does it with any text."""

    prompts: str | None = None
    """JSONL with prompt, question or messages, answered greedily; null for questions that pydocs holds out."""
    num_prompts: int = 32
    """Prompts, at most; 0 for none."""
    max_new_tokens: int = 32
    """Longest answer to a prompt, in tokens."""

    choices: str | None = None
    """JSONL for multiple choice: prompt, choices and gold (a number from 0), or GSM8K's question and answer, whose
    number then stands beside three wrong ones."""
    num_choices: int = 64
    """Rows of it, at most."""

    gsm8k: str | None = None
    """JSONL with question and answer (the number after ####), answered greedily through the chat template."""
    gsm8k_rows: int = 50
    """Questions of it, at most."""
    shots: int = 0
    """Solved examples before each question, from shots_from."""
    shots_from: str | None = None
    """JSONL like gsm8k's, of other questions."""
    gsm8k_max_new_tokens: int = 256
    """Longest solution, in tokens."""

    tasks: str | None = None
    """Folder of task files of lm-evaluation-harness; `shipped` for those of trainer/evaluate/tasks. Needs path=server
    and pip install -e '.[eval]'."""
    task_data: list[str] = field(default_factory=list)
    """Files that the tasks read, by the names in them: ['gsm8k=test.jsonl']; tasks without their file are left out."""
    task_limit: int | None = None
    """Items of a task; null for all."""

    recovered: bool = True
    """Also measure the original rounded to nearest on the grid of each candidate that has codes."""
    floors: bool = True
    """Also measure the original against itself, computed in other batches and by another program."""
    resamples: int = 2000
    """Bootstrap samples behind each 95 % interval."""
    seed: int = 0
    """Seeds the bootstrap and the wrong numbers."""
    out: str | None = None
    """Folder for evaluation.json, and GSM8K's answers."""

    def __post_init__(self) -> None:
        require(bool(self.names), "run is not set; give a run folder, an export folder, a .gguf file or a model's name")
        for key, path in (("path", self.path), ("against_path", self.against_path)):
            require(path in (*PATHS, None), f"{key}={path}; use one of {', '.join(PATHS)}")
        for _, path in self.candidates:
            require(path in PATHS, f"run has @{path}; use @ and one of {', '.join(PATHS)}")
        for name in (*(name for name, _ in self.candidates), *filter(None, [self.against])):
            if not Path(name).expanduser().is_dir():
                named_model(name)  # a word that is no model is answered before anything is opened
        require(self.dtype in DTYPES, f"dtype={self.dtype}; use one of {', '.join(DTYPES)}")
        self._check_numbers()
        for key in ("text", "prompts", "choices", "gsm8k", "shots_from"):
            value = getattr(self, key)
            require(value is None or Path(value).is_file(), f"{key}={value} is no file")
        require(
            self.shots == 0 or (self.gsm8k is not None and self.shots_from is not None),
            f"shots={self.shots} needs gsm8k=<file> and shots_from=<file of other questions>",
        )
        self._check_tasks()

    def _check_numbers(self) -> None:
        least = {"windows": 1, "window": 2, "num_prompts": 0, "max_new_tokens": 1, "num_choices": 1, "gsm8k_rows": 1}
        least |= {"shots": 0, "gsm8k_max_new_tokens": 1, "task_limit": 1, "resamples": 100, "seed": 0}
        for name, number in least.items():
            value = getattr(self, name)
            require(value is None or value >= number, f"{name}={value}; give at least {number}")

    def _check_tasks(self) -> None:
        if self.tasks is None:
            require(
                not self.task_data, f"task_data={self.task_data} has no effect without tasks=<folder>; leave it out"
            )
            return
        require(self.tasks == "shipped" or Path(self.tasks).is_dir(), f"tasks={self.tasks} is no folder")
        other = [name for name, path in self.candidates if path != "server"]
        require(
            not other,
            f"tasks={self.tasks} asks our server; compute {', '.join(other)} with path=server, or leave tasks out",
        )
        for item in self.task_data:
            name, equals, path = item.partition("=")
            require(bool(equals) and Path(path).is_file(), f"task_data has {item!r}; give name=<file>")

    @property
    def names(self) -> list[str]:
        """The candidates as they were given."""
        return [item.strip() for item in self.run.split(",") if item.strip()]

    @property
    def candidates(self) -> list[tuple[str, str]]:
        """(what it is, by what it is computed) of each."""
        found = []
        for item in self.names:
            name, _, path = item.rpartition("@") if "@" in Path(item).name else (item, "", self.path)
            found.append((name, path))
        return found
