"""What the report and its plots read: the records of the cells by method, and the methods' names for people."""

from study.adapters.cells import Sizes, cost_cells, long_cells, methods, starts, study_cells
from study.records import Records

LABELS = {
    "lora_16bit": "LoRA, 16-bit base",
    "qlora_nf4": "QLoRA, NF4",
    "qlora_fp4": "QLoRA, FP4",
    "qlora_int4": "QLoRA, INT4",
    "qlora_nf3": "QLoRA, NF3",
    "qlora_nf2": "QLoRA, NF2",
    "pissa_nf4": "PiSSA, NF4",
    "eva_nf4": "EVA, NF4",
    "dora_nf4": "DoRA, NF4",
    "rslora_nf4": "rsLoRA (s = 4), NF4",
    "qlora_slow_nf4": "QLoRA, lr / 4, NF4",
    "pissa_slow_nf4": "PiSSA, lr / 4, NF4",
    "eva_slow_nf4": "EVA, lr / 4, NF4",
}
_STARTS = {"plain": "plain", "loftq1": "LoftQ T=1", "loftq5": "LoftQ T=5", "loftq5c": "LoftQ T=5, calibrated"}
for _name in ("loftq1", "loftq5", "loftq5c"):
    LABELS |= {f"{_name}_{codebook}": f"{_STARTS[_name]}, {codebook.upper()}" for codebook in ("nf4", "nf3", "nf2")}


class Results:
    """Records of the cells that were measured.

    trained  method -> a record for each seed, the first seed first
    starts   name -> a point for each alpha
    costs    method -> its record
    curves   method -> pairs of step and held-out loss
    missing  cells of the study, costs and long ones aside, that were not measured, as text
    """

    def __init__(self, records: Records, sizes: Sizes) -> None:
        cells, others = study_cells(sizes), [*cost_cells(sizes), *long_cells(sizes)]
        found = records.of([*cells, *others])
        self.trained = {name: found[name] for name in methods(sizes) if name in found}
        self.starts = {name: found[name][0]["points"] for name in starts() if name in found}
        self.costs = {name: found[f"cost_{name}"][0] for name in methods(sizes) if f"cost_{name}" in found}
        self.curves = {name: found[f"long_{name}"][0]["curve"] for name in methods(sizes) if f"long_{name}" in found}
        self.missing = [f"{cell.name} (seed {cell.seed})" for cell in cells if not records.has(cell)]
        self.failures = records.failures([*cells, *others])
        self.all = [record for many in found.values() for record in many]

    def losses(self, name: str) -> list[float]:
        """Held-out losses of a method after training, by seed."""
        return [record["loss"] for record in self.trained.get(name, [])]


def start_parts(name: str) -> tuple[str, str]:
    """Codebook and method of a start cell: `start_nf2_loftq5` -> nf2, loftq5; `start_16bit` -> 16bit, nothing."""
    codebook, _, method = name.removeprefix("start_").partition("_")
    return codebook, method


def start_label(name: str) -> str:
    """The name of a start cell for people."""
    codebook, method = start_parts(name)
    return f"{codebook.upper()}, {_STARTS[method]}" if method else "16-bit"
