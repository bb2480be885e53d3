"""The house rules: imports flow one way, the README's tree is the disk, kernels/ is no package."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

ALLOWED = {
    "trainer.kernels": {"trainer.kernels"},
    "trainer.config": {"trainer.config"},
    "trainer.settings": {"trainer.config"},
    "trainer.compose": {"trainer.config", "trainer.settings"},
    "trainer.quantizer": {"trainer.kernels"},
    "trainer.resident": set(),
    "trainer.linear": {"trainer.quantizer", "trainer.kernels", "trainer.resident"},
    "trainer.quant_plan": {"trainer.quantizer"},
    "trainer.quant_grid": {"trainer.quantizer", "trainer.kernels"},
    "trainer.ptq": {
        *("trainer.architecture", "trainer.blockwise", "trainer.config", "trainer.data", "trainer.evaluate"),
        *("trainer.export", "trainer.formats", "trainer.fused_decoder", "trainer.kernels", "trainer.linear"),
        *("trainer.metrics", "trainer.model", "trainer.ptq", "trainer.qat", "trainer.quant_grid", "trainer.quant_plan"),
        *("trainer.quantizer", "trainer.resident"),
    },
    "trainer.layout_of_run": {
        *("trainer.compose", "trainer.config", "trainer.export", "trainer.formats", "trainer.model", "trainer.run"),
    },
    "trainer.lora": {
        "trainer.architecture",
        "trainer.linear",
        "trainer.quantizer",
        "trainer.kernels",
        "trainer.config",
    },
    "trainer.lora_init": {"trainer.config", "trainer.linear", "trainer.lora", "trainer.quantizer", "trainer.kernels"},
    "trainer.svd": set(),
    "trainer.eva": {"trainer.config", "trainer.lora", "trainer.svd"},
    "trainer.loftq": {"trainer.config", "trainer.lora", "trainer.quantizer", "trainer.svd"},
    "trainer.vocabulary": {"trainer.config"},
    "trainer.neftune": set(),
    "trainer.sources": {"trainer.sources", "trainer.config"},
    "trainer.formats": {
        *("trainer.architecture", "trainer.config", "trainer.formats", "trainer.kernels", "trainer.linear"),
        *("trainer.lora", "trainer.qat", "trainer.quant_plan", "trainer.quantizer", "trainer.vocabulary"),
    },
    "trainer.convert": {
        *("trainer.architecture", "trainer.export", "trainer.formats", "trainer.linear", "trainer.qat"),
    },
    "trainer.agreement": {
        *("trainer.architecture", "trainer.config", "trainer.objective", "trainer.qat", "trainer.serve"),
    },
    "trainer.finish": {
        *("trainer.agreement", "trainer.architecture", "trainer.convert", "trainer.export", "trainer.prepare"),
        *("trainer.qat", "trainer.resident", "trainer.vocabulary"),
    },
    "trainer.model": {
        *("trainer.config", "trainer.formats", "trainer.linear", "trainer.lora", "trainer.qat"),
        *("trainer.quant_plan", "trainer.quantizer", "trainer.sources", "trainer.vocabulary"),
    },
    "trainer.architecture": set(),
    "trainer.qat": {
        *("trainer.architecture", "trainer.config", "trainer.kernels", "trainer.linear", "trainer.lora"),
        *("trainer.qat", "trainer.quant_grid", "trainer.quantizer"),
    },
    "trainer.fused_decoder": {
        *("trainer.architecture", "trainer.linear", "trainer.lora", "trainer.qat", "trainer.kernels"),
    },
    "trainer.objective": {
        *("trainer.architecture", "trainer.data", "trainer.qat", "trainer.fused_decoder", "trainer.kernels"),
        "trainer.neftune",
    },
    "trainer.preference": {"trainer.config", "trainer.data", "trainer.objective"},
    "trainer.reference": {"trainer.data", "trainer.preference"},
    "trainer.figures": {"trainer.config"},
    "trainer.teacher_cache": {
        *("trainer.config", "trainer.kernels", "trainer.linear", "trainer.objective", "trainer.sources"),
    },
    "trainer.distillation": {
        *("trainer.config", "trainer.qat", "trainer.kernels", "trainer.objective", "trainer.teacher_cache"),
    },
    "trainer.chat_messages": set(),
    "trainer.page": {"trainer.page"},
    "trainer.data": {"trainer.chat_messages", "trainer.config", "trainer.data", "trainer.page", "trainer.sources"},
    "trainer.optim": {"trainer.config"},
    "trainer.master_weights": {"trainer.config", "trainer.optim"},
    "trainer.metrics": {"trainer.config"},
    "trainer.checkpoint": {"trainer.config", "trainer.qat"},
    "trainer.export": {
        *("trainer.architecture", "trainer.config", "trainer.export", "trainer.figures", "trainer.formats"),
        *("trainer.kernels", "trainer.linear", "trainer.lora", "trainer.model", "trainer.qat"),
        *("trainer.quant_plan", "trainer.quantizer", "trainer.vocabulary"),
    },
    "trainer.serve": {
        *("trainer.architecture", "trainer.chat_messages", "trainer.compose", "trainer.config", "trainer.export"),
        *("trainer.formats", "trainer.kernels", "trainer.linear", "trainer.lora", "trainer.model", "trainer.qat"),
        *("trainer.quantizer", "trainer.resident", "trainer.serve", "trainer.settings", "trainer.vocabulary"),
    },
    "trainer.evaluate": {
        *("trainer.architecture", "trainer.compose", "trainer.config", "trainer.data", "trainer.evaluate"),
        *("trainer.export", "trainer.figures", "trainer.formats", "trainer.kernels", "trainer.linear", "trainer.lora"),
        *("trainer.metrics", "trainer.model", "trainer.objective", "trainer.page", "trainer.qat", "trainer.quantizer"),
        *("trainer.resident", "trainer.serve", "trainer.settings", "trainer.sources"),
    },
    "trainer.leave_report": {"trainer.evaluate", "trainer.prepare"},
    "trainer.blockwise": {
        *("trainer.blockwise", "trainer.config", "trainer.data", "trainer.fused_decoder"),
        *("trainer.linear", "trainer.objective", "trainer.qat", "trainer.quantizer"),
    },
    "trainer.plan": {
        *("trainer.architecture", "trainer.config", "trainer.kernels", "trainer.linear", "trainer.lora"),
        *("trainer.model", "trainer.plan", "trainer.prepare", "trainer.qat", "trainer.quant_plan"),
        *("trainer.quantizer", "trainer.serve", "trainer.sources"),
    },
    "trainer.loop": {
        *("trainer.checkpoint", "trainer.config", "trainer.data", "trainer.metrics", "trainer.objective"),
        "trainer.optim",
    },
}
"""Module or folder -> what it may import of ours. prepare*, run, __main__, scripts/ may import all."""


def modules() -> list[Path]:
    return sorted([*ROOT.glob("trainer/**/*.py"), *ROOT.glob("kernels/*.py")])


def group_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "trainer.kernels" if parts[0] == "kernels" else ".".join(parts[:2])


def imported(path: Path) -> set[str]:
    """The modules of ours that a file imports, as the groups of ALLOWED."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            named = {alias.name for alias in node.names} - {"__version__"}
            names |= {f"{node.module}.{name}" if node.module == "trainer" else node.module for name in named}
    return {".".join(name.split(".")[:2]) for name in names if name.split(".")[0] == "trainer"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_flow_one_way(path):
    group = group_of(path)
    if group in (
        "trainer.__init__",
        "trainer.__main__",
        "trainer.prepare",
        "trainer.prepare_data",
        "trainer.prepare_weights",
        "trainer.run",
    ):
        return
    assert group in ALLOWED, f"{path} has no place in the import order; add it to ALLOWED and docs/decisions.md"
    assert imported(path) <= ALLOWED[group]


@pytest.mark.parametrize("path", sorted(ROOT.glob("kernels/*.py")), ids=lambda path: path.name)
def test_kernels_import_only_torch_triton_numpy(path):
    foreign = {"transformers", "peft", "accelerate", "datasets", "hydra", "omegaconf", "bitsandbytes", "safetensors"}
    assert (
        not {name.split(".")[0] for name in re.findall(r"^(?:from|import) ([\w.]+)", path.read_text(), re.M)} & foreign
    )


def test_kernels_is_no_package():
    """Hugging Face libraries probe for a package named `kernels`; a folder with __init__.py would be executed."""
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_only_the_top_package_has_an_init():
    assert [str(path.relative_to(ROOT)) for path in ROOT.glob("trainer/**/__init__.py")] == ["trainer/__init__.py"]


def test_wheel_lists_every_folder():
    listed = set(re.findall(r'^    "(trainer[\w.]*)",$', (ROOT / "pyproject.toml").read_text(), re.M))
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("trainer/**/*.py")}
    assert listed == folders | {"trainer.kernels", "trainer.conf"}


def test_readme_tree_is_the_disk():
    """Each file of the product stands in the README's tree, and each line of the tree is on disk."""
    block = re.search(r"```\n(train\.py .*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S)[1]
    tree, folders = set(), []
    for line in block.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders = folders[:depth] + [name.rstrip("/")]
        if not name.endswith("/"):
            tree.add("/".join(folders))
    product = (
        "trainer/**/*.py",
        "kernels/*.py",
        "kernels/*.json",
        "kernels/cpp/*",
        "conf/**/*.yaml",
        "scripts/*.py",
        "notebooks/*.ipynb",
        "trainer/serve/http/page/*",
        "trainer/data/inspection/page.*",
        "trainer/evaluate/report/*.css",
        "trainer/page/*.css",
    )
    disk = {str(path.relative_to(ROOT)) for pattern in ("train.py", *product) for path in ROOT.glob(pattern)}
    assert tree == disk


def test_no_module_is_a_drawer_without_a_label():
    assert not {path.stem for path in modules()} & {"utils", "helpers", "common", "misc", "manager"}


def test_readme_has_the_two_commands_and_no_gap():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "\npip install -e . && python train.py conf=qlora\n" in readme
    assert "\npip install -e '.[test]' && pytest -n auto --dist loadfile\n" in readme
    assert "@@" not in readme
