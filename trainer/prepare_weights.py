"""From a loaded model to the one that is trained: base packed, adapter attached, or every weight, perhaps rounded.

What an adapter starts from, or what LoftQ chose, is computed once in a run and read afterwards.
"""

import logging
from pathlib import Path

from accelerate import Accelerator
from datasets import Dataset
from peft import PeftModel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from trainer.checkpoint import checkpoints
from trainer.config.lora import LoraInit
from trainer.config.quant import Codebook
from trainer.config.schema import Config
from trainer.config.train import Weights
from trainer.eva import initialize_eva, restore_eva
from trainer.export.base_codes import FILE_NAME as BASE_CODES
from trainer.export.base_codes import load_base_codes, write_base_codes
from trainer.linear import pack_nearest
from trainer.loftq import Loftq, measure_input_scales
from trainer.lora import Factors, attach_lora
from trainer.lora_init import load_directions, load_factors, pack_residual, principal_factors, save_factors
from trainer.model import prepare_model
from trainer.qat.lora import attach_merge_aware
from trainer.qat.prepare import layer_schemes, prepare_qat

log = logging.getLogger(__name__)


def prepare_weights(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    dataset: Dataset,
    config: Config,
    run_dir: Path,
    accelerator: Accelerator,
) -> PeftModel | PreTrainedModel:
    """`model` as `train.weights` and `quant` want it, on its device; changed in place.

    dataset  training rows, which LoftQ and EVA may look at
    raises   UserError for layers that a quantizer or an adapter does not fit
    """
    start = _pack(model, dataset, config, run_dir, accelerator)
    if config.train.weights is Weights.all:
        model.requires_grad_(True)
        if config.qat.enabled:
            prepare_qat(model, config.qat)
        return model.to(accelerator.device)
    token_ids = tokenizer.convert_tokens_to_ids(config.model.add_tokens)
    _warn_of_unseen(dict(zip(config.model.add_tokens, token_ids, strict=True)), dataset)
    options = {"seed": config.seed, "start": start, "token_ids": token_ids}
    if config.qat.enabled:
        trained = attach_merge_aware(model, config.lora, layer_schemes(model, config.qat), **options)
    else:
        trained = attach_lora(model, config.lora, **options)
    trained.to(accelerator.device)
    if config.lora.init is LoraInit.eva:
        _start_from_activations(trained, dataset, config, run_dir, accelerator)
    return trained


def _pack(
    model: PreTrainedModel, dataset: Dataset, config: Config, run_dir: Path, accelerator: Accelerator
) -> Factors | None:
    """Pack the base; returns where the adapter starts, if not plain.

    One process of a new LoftQ run chooses codes and factors; the others, and a resumed run, read them.
    """
    with accelerator.main_process_first():
        if not config.loftq.iterations:
            start = _principal_factors(model, config, run_dir, accelerator)
            if config.quant.codebook is not Codebook.none:
                prepare_model(
                    model, config.quant, pack=pack_nearest if start is None else pack_residual(start, config.lora)
                )
                if start is not None and accelerator.is_main_process:
                    write_base_codes(model, start, run_dir)
            return start
        if checkpoints(run_dir) or not accelerator.is_main_process:
            prepare_model(model, config.quant)
            if (run_dir / BASE_CODES).is_file():
                load_base_codes(model, run_dir)
            return load_factors(run_dir)
        rows = dataset[: config.loftq.calibration_rows]["input_ids"]
        loftq = Loftq(config.loftq, config.lora, measure_input_scales(model, rows), accelerator.device)
        prepare_model(model, config.quant, pack=loftq)
        loftq.finish()
        loftq.write_report(run_dir / "loftq.json")
        write_base_codes(model, loftq.changed, run_dir)
        save_factors(run_dir, loftq.factors)
        return loftq.factors


def _principal_factors(
    model: PreTrainedModel, config: Config, run_dir: Path, accelerator: Accelerator
) -> Factors | None:
    """What PiSSA or OLoRA takes out of the weights: computed once in a run, then read; None for other starts."""
    if config.lora.init not in (LoraInit.pissa, LoraInit.olora):
        return None
    if checkpoints(run_dir) or not accelerator.is_main_process:
        return load_factors(run_dir)
    factors = principal_factors(model, config.lora)
    save_factors(run_dir, factors)
    return factors


def _start_from_activations(
    model: PeftModel, dataset: Dataset, config: Config, run_dir: Path, accelerator: Accelerator
) -> None:
    """EVA's ranks and directions: computed once in a run, then read."""
    with accelerator.main_process_first():
        if accelerator.is_main_process and not checkpoints(run_dir):
            save_factors(run_dir, initialize_eva(model, dataset))
        restore_eva(model, load_directions(run_dir))


def _warn_of_unseen(tokens: dict[str, int], dataset: Dataset) -> None:
    """Say which added tokens no training row holds: their rows stay the mean of the others."""
    unseen = set(tokens.values())
    for row in dataset["input_ids"] if unseen else ():
        unseen -= set(row)
    if unseen:
        names = [token for token, index in tokens.items() if index in unseen]
        log.warning("model.add_tokens has %s, which no training row holds; nothing is learned about them", names)
