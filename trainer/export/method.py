"""How a run trained, in words, for the model cards and `lowbit.json`: what was trained, through what, on which loss."""

from trainer.config.distill import DistillConfig, DistillTokens, Divergence
from trainer.config.lora import LoraInit
from trainer.config.preference import DpoLoss, Method
from trainer.config.qat import QatConfig, RoundingName, SchemeName
from trainer.config.quant import Codebook
from trainer.config.schema import Config
from trainer.config.train import Weights
from trainer.model import low_quantizer_of, quantizer_of
from trainer.qat.prepare import scheme_of
from trainer.qat.scheme import Scheme
from trainer.quantizer import WHOLE_ROW


def describe_method(config: Config) -> str:
    """How the run trained, as the beginning of a sentence."""
    how = _describe_weights(config)
    how += f", {_describe_qat(config.qat)}" if config.qat.enabled else ""
    how += _describe_objective(config)
    how += f", {_describe_teacher(config.distill)}" if config.distill.enabled else ""
    return f"{how}, with NEFTune ({config.train.neftune_alpha:g})" if config.train.neftune_alpha else how


def _describe_objective(config: Config) -> str:
    preference = config.preference
    if preference.method is Method.none:
        return ""
    name = "IPO" if preference.loss is DpoLoss.ipo else preference.method.value.upper()
    return f", by {name} (beta {preference.beta:g})"


def _describe_weights(config: Config) -> str:
    if config.train.weights is Weights.all:
        return "All weights"
    if config.train.weights is Weights.scales:
        if not config.blockwise.epochs:
            return "Scales of nearest codes"
        blocks = f"All weights block by block (epochs: {config.blockwise.epochs})"
        return blocks if config.train.max_steps == 0 else f"{blocks} and then all scales"
    lora, quant = config.lora, config.quant
    name = {(False, False): "LoRA", (True, False): "DoRA", (False, True): "rsLoRA"}.get(
        (lora.use_dora, lora.use_rslora), "DoRA with rsLoRA's scaling"
    )
    targets = "all linear layers" if lora.target_modules == "all-linear" else lora.target_modules
    adapter = f"{name} of rank {lora.rank}, alpha {lora.alpha:g}, on {targets}"
    if config.qat.enabled:
        return f"{adapter} of a 16-bit base, merge-aware"
    adapter += "" if lora.init is LoraInit.default else f", started by {_INITS[lora.init]}"
    adapter += f", started by LoftQ ({config.loftq.iterations} rounds)" if config.loftq.iterations else ""
    adapter += f", with {', '.join(lora.modules_to_save)} trained whole," if lora.modules_to_save else ""
    if quant.codebook is Codebook.none:
        return f"{adapter} of a base that is not packed"
    quantizer = quantizer_of(quant)
    codebook = quantizer.codebook.upper()
    if quant.bits_budget is not None:
        codebook += f" and {low_quantizer_of(quant).codebook.upper()} ({quant.bits_budget:g} bits on average)"
    if quantizer.group_size is not None:
        scales = "a scale a row" if quantizer.group_size == WHOLE_ROW else f"groups of {quantizer.group_size}"
    else:
        double = " with double quantisation" if quantizer.double_quant else ""
        scales = f"blocks of {quantizer.block_size}{double}"
    return f"{adapter} of a base packed to {codebook} ({scales})"


_INITS = {LoraInit.pissa: "PiSSA", LoraInit.olora: "OLoRA", LoraInit.eva: "EVA"}


def _describe_qat(qat: QatConfig) -> str:
    """through INT4 in groups of 32, learned scales; down_proj: INT8 with a scale a row; layers.0.*: 16 bits"""
    names = {"": qat.scheme, **qat.patterns}
    if qat.scheme is SchemeName.none:
        del names[""]
    kinds = [
        f"{pattern}: {_describe_name(name, qat)}" if pattern else _describe_name(name, qat)
        for pattern, name in names.items()
    ]
    text = f"through {'; '.join(kinds)}"
    if qat.start:
        text += f", from step {qat.start:g} on" if qat.start >= 1 else f", after {100 * qat.start:g} % of the steps"
    return f"{text}, keys and values in INT8" if qat.kv_cache else text


def _describe_name(name: SchemeName, qat: QatConfig) -> str:
    if name is SchemeName.none:
        return "16 bits"
    scheme = scheme_of(name, qat)
    text = describe_scheme(scheme)
    if scheme.activations is not None and scheme.activations.static:
        text += f" ({scheme.activations.observer.kind.value.replace('_', ' ')})"
    text += ", learned scales" if scheme.learn_scales else ""
    return text if scheme.rounding.value == RoundingName.nearest.value else f"{text}, {scheme.rounding.value} rounding"


def _describe_teacher(distill: DistillConfig) -> str:
    """taught by its 16-bit self (forward KL of weight 0.5 at temperature 2, its 64 likeliest tokens)"""
    kind = "reverse KL" if distill.loss is Divergence.reverse_kl else "forward KL"
    tokens = f"its {distill.top_k} likeliest tokens" if distill.top_k else "its whole distribution"
    where = ", at the prompts too" if distill.tokens is DistillTokens.all else ""
    return (
        f"taught by the 16-bit model ({kind} of weight {distill.weight:g} at temperature {distill.temperature:g}, "
        f"{tokens}{where})"
    )


def describe_scheme(scheme: Scheme) -> str:
    """INT4 in groups of 32, inputs in INT8 with a scale a token"""
    weight, inputs = scheme.weight, scheme.activations
    text = scheme.weight_name.upper()
    group_size = getattr(weight, "group_size", None)
    if group_size is not None:
        text += " with a scale a row" if group_size == -1 else f" in groups of {group_size}"
        text += "" if getattr(weight, "symmetric", None) is not False else ", asymmetric"
    elif getattr(weight, "block_size", None) is not None:
        text += f" in blocks of {weight.block_size}" + (" with double quantisation" if weight.double_quant else "")
    if inputs is None:
        return text
    grid = getattr(inputs.grid, "format", "int8").upper()
    return f"{text}, inputs in {grid} with a scale a {'layer' if inputs.static else 'token'}"
