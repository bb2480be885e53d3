"""PtqConfig: what `python scripts/quantize.py` accepts as key=value."""

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from trainer.config.errors import require


class PtqMethod(StrEnum):
    rtn = "rtn"
    awq = "awq"
    gptq = "gptq"
    smoothquant = "smoothquant"
    int8_dynamic = "int8_dynamic"
    hqq = "hqq"
    gguf = "gguf"


class Fold(StrEnum):
    """What is folded from inputs into weights first; see trainer/ptq/folds.py."""

    none = "none"
    awq = "awq"
    smooth = "smooth"


class ActOrder(StrEnum):
    """In which order GPTQ rounds features; see trainer/ptq/gptq.py."""

    none = "none"
    static = "static"
    groups = "groups"


class Match(StrEnum):
    """Whose inputs a layer's output is compared on; see trainer/ptq/gptq.py."""

    quantized = "quantized"
    original = "original"


INT8_METHODS = (PtqMethod.smoothquant, PtqMethod.int8_dynamic)
CODEBOOKS = ("int4", "int8", "nf4", "fp4", "nf3", "nf2")
INTEGERS = {"int4", "int8"}
EXPORTS = ("quantized", "merged", "gptq", "awq", "compressed_tensors", "bnb", "gguf")
REPORT = "quantize.json"
"""What marks a folder that quantize.py wrote."""
DEFAULT_FOLD = {
    PtqMethod.awq: Fold.awq,
    PtqMethod.smoothquant: Fold.smooth,
    PtqMethod.int8_dynamic: Fold.smooth,
}


@dataclass
class PtqConfig:
    """Post-training quantization of one model."""

    model: str = "smollm2_135m"
    """A Hugging Face folder, a .gguf file, `org/name` on the hub, smollm2_135m or tiny; in 16 or 32 bits."""
    method: PtqMethod = PtqMethod.gptq
    """rtn rounds to nearest; awq protects the weights of large inputs and cuts ranges; gptq makes errors cancel;
    smoothquant has INT8 weights and static INT8 inputs; int8_dynamic inputs with a scale a token, smoothed too unless
    fold=none, which needs no data; hqq fits scales and zero points without data; gguf has llama.cpp's blocks
    (`gguf_type`)."""
    output_dir: str | None = None
    """Where the result goes; null for outputs/ptq/<model>_<method>."""
    formats: list[str] = field(default_factory=list)
    """quantized (ours: what the server multiplies), merged (the values in 16 bits), gptq, awq, compressed_tensors, bnb,
    gguf: what other engines load. Empty for quantized, and for gguf with method=gguf."""
    dtype: str = "auto"
    """bfloat16, float16 or float32 of what stays in 16 bits; auto as in training."""

    codebook: str | None = None
    """int4, int8, nf4, fp4, nf3 or nf2; null for int4, and int8 where inputs are rounded."""
    group_size: int | None = None
    """int4, int8: input features that share a scale, or -1 for a whole row; null for 32 (int4) and -1 (int8)."""
    block_size: int | None = None
    """nf4, fp4, nf3, nf2: weights that share a scale; null for 64."""
    symmetric: bool | None = None
    """int4: no zero point; null for true, and false with awq and hqq."""
    double_quant: bool | None = None
    """nf4, fp4, nf3, nf2: scales in 8 bits too; null for true."""
    scale_dtype: str = "float16"
    """int4, int8: what scales are rounded to before codes are chosen: float16, which every format stores, bfloat16 or
    float32."""
    exclude: list[str] = field(default_factory=list)
    """Layers that stay in 16 bits, by shell patterns of the ends of their names: ['down_proj', 'layers.0.*'].
    Embeddings and output head always do."""
    bits_budget: float | None = None
    """Mean bits of a code over all layers: those for which the model is most sensitive get high_codebook, the others
    `codebook`. null: the same for all."""
    high_codebook: str = "int8"
    """bits_budget: what sensitive layers get."""

    data: str = "pydocs"
    """Calibration: pydocs (questions about Python's standard library), a .jsonl file (chat messages, prompt and
    completion, or text) or a .txt file; several with commas between. Best is what the model will be asked."""
    columns: list[str] = field(default_factory=list)
    """What a .jsonl file calls its fields: ['prompt=question', 'completion=answer']."""
    rows: int = 128
    """Rows of calibration, at most."""
    max_seq_len: int = 512
    """Tokens of a row, at most; text is cut into rows of this length."""
    eval_rows: int = 16
    """Rows that no calibration sees: on them the result is compared with the 16-bit model."""
    seed: int = 0
    """Chooses the rows."""

    gguf_type: str = "Q4_K_M"
    """method=gguf: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q4_K_S, Q4_K_M, Q5_K_M, Q6_K, F16 or BF16."""
    imatrix: bool = True
    """method=gguf: weigh rounding errors by the mean square of each input over the calibration."""

    fold: Fold | None = None
    """none, awq or smooth; null for what the method is named after, so that awq and gptq can be put together."""
    alpha: float | None = None
    """smooth: how much of the difficulty goes from inputs to weights, 0 to 1; null searches stage by stage."""
    damping: float = 0.01
    """gptq, smoothquant, int8_dynamic: added to the Hessian's diagonal, as a share of its mean; more where there is no
    Cholesky factor."""
    act_order: ActOrder = ActOrder.static
    """gptq: features with the largest inputs are rounded first, in groups of the file's order (static), or groups are
    cut along that order too (groups: the file gets a g_idx, which some engines read slowly); none: left to right."""
    search_scales: bool = True
    """gptq: scales with the smallest weighted error instead of those that reach the largest weight."""
    refit_scales: bool = True
    """gptq: scales are solved for once the codes are chosen."""
    match: Match = Match.quantized
    """gptq: make the quantized model's layers give what they give for their own inputs in 16 bits (quantized), or what
    the 16-bit model's layers give for theirs (original)."""
    min_signal: float = 36.0
    """smoothquant, int8_dynamic: what rounding its inputs must leave of a layer's product, in dB of signal to noise;
    with less a static scale becomes a scale a token, and that 16-bit inputs. 0 rounds the inputs of every layer."""

    max_pass_tokens: int | None = None
    """Tokens that go through a block at once; null for 2048 on a CPU and 16384 on a GPU."""

    def __post_init__(self) -> None:
        self.method = PtqMethod(self.method)
        self.fold = DEFAULT_FOLD.get(self.method, Fold.none) if self.fold is None else Fold(self.fold)
        self.act_order, self.match = ActOrder(self.act_order), Match(self.match)
        gguf = self.method is PtqMethod.gguf
        self.formats = self.formats or (["gguf"] if gguf else ["quantized"])
        require(
            not gguf or self.formats == ["gguf"],
            f"formats={self.formats} with method=gguf, whose blocks are in GGUF files only; leave formats out",
        )
        for name in self.formats:
            require(name in EXPORTS, f"formats has {name!r}; accepted: {', '.join(EXPORTS)}")
        require(
            self.dtype in ("auto", "bfloat16", "float16", "float32"),
            f"dtype={self.dtype}; use auto, bfloat16, float16 or float32",
        )
        self._check_numbers()
        self._check_data()
        if not gguf:
            self._check_codebook()
        self._check_effects()
        require(
            self.act_order is not ActOrder.groups or self.codebook == "int4",
            f"act_order=groups with codebook={self.codebook}; use int4, or act_order=static",
        )
        require(
            self.fold is not Fold.smooth or self.method in INT8_METHODS,
            f"fold=smooth with method={self.method}, whose inputs are not rounded; use fold=awq, or method=smoothquant",
        )
        require(
            self.method is not PtqMethod.hqq or self.codebook == "int4",
            f"codebook={self.codebook} with method=hqq, which moves scales and zero points of int4; use method=rtn",
        )

    def _check_numbers(self) -> None:
        for name, least in (("rows", 1), ("max_seq_len", 8), ("eval_rows", 1), ("seed", 0), ("max_pass_tokens", 1)):
            value = getattr(self, name)
            require(value is None or value >= least, f"{name}={value}; give at least {least}")
        require(0 < self.damping <= 1, f"damping={self.damping}; use a share above 0, at most 1, such as 0.01")
        require(self.alpha is None or 0 <= self.alpha <= 1, f"alpha={self.alpha}; use 0 to 1, such as 0.5, or null")

    def _check_data(self) -> None:
        for source in self.data.split(","):
            require(
                source == "pydocs" or Path(source).suffix in (".jsonl", ".txt"),
                f"data={source} is neither pydocs nor a .jsonl or .txt file",
            )
            require(source == "pydocs" or Path(source).is_file(), f"data={source} is not a file; give one, or pydocs")

    def _check_codebook(self) -> None:
        int8 = self.method in INT8_METHODS
        self.codebook = ("int8" if int8 else "int4") if self.codebook is None else self.codebook
        accepted = {PtqMethod.smoothquant: ("int8",), PtqMethod.int8_dynamic: ("int8", "int4")}
        for name in self._codebooks:
            require(name in CODEBOOKS, f"codebook={name}; use one of {', '.join(CODEBOOKS)}")
            allowed = accepted.get(self.method, CODEBOOKS)
            require(
                name in allowed,
                f"codebook={name} with method={self.method}, whose products are of integers; use "
                f"{' or '.join(allowed)}",
            )
        if "int4" in self._codebooks and self.symmetric is None:
            self.symmetric = self.method not in (PtqMethod.awq, PtqMethod.hqq)

    @property
    def _codebooks(self) -> tuple[str, ...]:
        """What layers may get; nothing with method=gguf."""
        if self.method is PtqMethod.gguf:
            return ()
        return (self.codebook,) if self.bits_budget is None else (self.codebook, self.high_codebook)

    def _check_effects(self) -> None:
        """raises  UserError for a key that was set and that nothing reads"""
        books, method = set(self._codebooks), f"method={self.method}"
        chosen = f"codebook={' and '.join(self._codebooks)}" if books else method
        files = set(self.formats) - {"quantized", "gguf"}
        measured = self.method is PtqMethod.smoothquant or (
            self.method is PtqMethod.int8_dynamic and self.fold is not Fold.none
        )
        gptq = dict.fromkeys(("act_order", "search_scales", "refit_scales", "match"), self.method == "gptq")
        gguf = dict.fromkeys(("gguf_type", "imatrix"), not books)
        codes = dict.fromkeys(("codebook", "exclude", "bits_budget"), bool(books))
        readers = {
            **{name: (read, method, "method=gptq") for name, read in gptq.items()},
            **{name: (read, method, "method=gguf") for name, read in gguf.items()},
            **{name: (read, method, "another method") for name, read in codes.items()},
            "fold": (bool(books) or self.fold is Fold.none, method, "another method"),
            "damping": (measured or self.method is PtqMethod.gptq, method, "method=gptq"),
            "min_signal": (measured, f"{method} fold={self.fold}", "method=smoothquant"),
            "alpha": (self.fold is Fold.smooth, f"fold={self.fold}", "fold=smooth"),
            "symmetric": ("int4" in books, chosen, "codebook=int4"),
            **dict.fromkeys(("group_size", "scale_dtype"), (bool(books & INTEGERS), chosen, "codebook=int4 or int8")),
            **dict.fromkeys(("block_size", "double_quant"), (bool(books - INTEGERS), chosen, "codebook=nf4")),
            "high_codebook": (self.bits_budget is not None, "bits_budget=null", "bits_budget=5, say"),
            "columns": (".jsonl" in self.data, f"data={self.data}", "a .jsonl file"),
        }
        for name, (read, beside, use) in readers.items():
            field_of = type(self).__dataclass_fields__[name]
            default = [] if name in ("exclude", "columns") else field_of.default
            value = getattr(self, name)
            use = use if books or name in gguf else "another method"
            require(read or value == default, f"{name}={value} has no effect with {beside}; leave it out, or use {use}")
        require(
            self.dtype != "float16" or bool(files),
            f"dtype=float16 has no effect with formats={self.formats}, which keep what the model computes in; "
            "leave it out",
        )
