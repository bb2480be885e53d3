"""How a model was quantized, in words, for logs and model cards."""

from trainer.config.ptq import INT8_METHODS, ActOrder, Fold, Match, PtqConfig, PtqMethod

_METHODS = {
    PtqMethod.rtn: "Rounded to nearest",
    PtqMethod.awq: "AWQ",
    PtqMethod.gptq: "GPTQ",
    PtqMethod.smoothquant: "Static INT8 inputs by SmoothQuant",
    PtqMethod.int8_dynamic: "INT8 inputs with a scale a token",
    PtqMethod.hqq: "HQQ",
}
_FOLDS = {Fold.awq: "AWQ's factors", Fold.smooth: "SmoothQuant's factors"}
_ORDERS = {ActOrder.static: "in order of their inputs", ActOrder.groups: "in groups along the order of their inputs"}


def describe_ptq(config: PtqConfig, data: str) -> str:
    """GPTQ with AWQ's factors to INT4 in groups of 32, rounding features in order of their inputs, on <data>"""
    if config.method is PtqMethod.gguf:
        text = f"Rounded to llama.cpp's {config.gguf_type}" + (", weighed by an importance matrix" * config.imatrix)
        return f"{text}, on {data}" if data else text
    text = _METHODS[config.method]
    named = {PtqMethod.awq: Fold.awq, PtqMethod.smoothquant: Fold.smooth}.get(config.method, Fold.none)
    if config.fold is Fold.none and named is not Fold.none:
        text += f" without {_FOLDS[named]}"
    elif config.fold is not named:
        text += f" with {_FOLDS[config.fold]}"
    int8 = config.method in INT8_METHODS
    text += f"{' and weights in' if int8 else ' to'} {_describe_weights(config)}"
    text += ", by GPTQ" if int8 and config.fold is not Fold.none else ""
    if config.method is PtqMethod.gptq:
        order = _ORDERS.get(config.act_order)
        text += f", rounding features {order}" if order else ""
        text += ", matching the 16-bit model's outputs" if config.match is Match.original else ""
    if config.bits_budget is not None:
        text += f", {config.high_codebook.upper()} where the model needs it ({config.bits_budget:g} bits on average)"
    return f"{text}, on {data}" if data else text


def _describe_weights(config: PtqConfig) -> str:
    name = config.codebook.upper()
    if config.codebook not in ("int4", "int8"):
        double = "" if config.double_quant is False else " with double quantization"
        return f"{name} in blocks of {config.block_size or 64}{double}"
    size = config.group_size or (32 if config.codebook == "int4" else -1)
    scales = "a scale a row" if size == -1 else f"groups of {size}"
    asymmetric = ", asymmetric" if config.codebook == "int4" and not config.symmetric else ""
    return f"{name} in {scales}{asymmetric}" if size != -1 else f"{name} with {scales}{asymmetric}"
