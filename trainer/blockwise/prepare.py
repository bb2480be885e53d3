"""From a 16-bit model to one whose scales are trained: codes chosen block by block, or the nearest ones.

The two phases of EfficientQAT (arXiv:2407.11062): Block-AP (blocks.py) fixes the codes, E2E-QP (scales.py)
trains what is left on the model's own loss, in the one loop. Afterwards there are no 16-bit weights to go back to, so
what the model lost by plain rounding is measured here.
"""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from accelerate import Accelerator
from datasets import Dataset
from transformers import PreTrainedModel

from trainer.blockwise.block import nearest_codes
from trainer.blockwise.blocks import BlockwiseTraining, by_block
from trainer.blockwise.files import write_report
from trainer.blockwise.scales import train_scales
from trainer.config.errors import UserError
from trainer.config.schema import Config
from trainer.linear import QuantLinear
from trainer.qat.prepare import layer_schemes
from trainer.qat.scheme import Scheme

log = logging.getLogger(__name__)

Measure = Callable[[PreTrainedModel], dict[str, float]]
"""Held-out figures of a model, `loss` among them."""


def prepare_scales(
    model: PreTrainedModel,
    dataset: Dataset,
    config: Config,
    run_dir: Path,
    accelerator: Accelerator,
    *,
    max_pass_tokens: int,
    measure: Measure | None,
) -> tuple[dict[str, float], dict[str, float]] | None:
    """Pack the layers that have a scheme and train their scales from now on, in place.

    One process trains the blocks; the others, and a resumed run, read them.

    measure  None, or what is wanted to know before: in 16 bits, and rounded to nearest
    returns  these two
    raises   UserError for what blocks or schemes cannot have
    """
    schemes = layer_schemes(model, config.qat)
    by_block(schemes, model.config.num_hidden_layers)
    before = None if measure is None else _figures_before(model, schemes, measure, accelerator)
    if config.blockwise.epochs:
        with accelerator.main_process_first():
            phase = BlockwiseTraining(
                model,
                schemes,
                dataset["input_ids"],
                config.blockwise,
                run_dir / "blockwise",
                seed=config.seed,
                device=accelerator.device,
                max_pass_tokens=max_pass_tokens,
            )
            reports = phase.run()
            if accelerator.is_main_process:
                write_report(reports, config.blockwise, run_dir / "blockwise.json")
    else:
        pack_nearest_codes(model, schemes)
    train_scales(model, dtype=model.dtype)
    return before


def pack_nearest_codes(model: PreTrainedModel, schemes: Mapping[str, Scheme]) -> None:
    """Round the layers `schemes` to nearest, in place.

    raises  UserError naming a weight that is inf or nan
    """
    for name, scheme in schemes.items():
        layer = model.get_submodule(name)
        try:
            codes = nearest_codes({name: layer.weight.detach()}, {name: scheme})[name]
        except ValueError as error:
            raise UserError(f"{error}. The checkpoint is damaged; load another one") from None
        model.set_submodule(name, QuantLinear(codes, layer.bias))


def _figures_before(
    model: PreTrainedModel, schemes: Mapping[str, Scheme], measure: Measure, accelerator: Accelerator
) -> tuple[dict[str, float], dict[str, float]]:
    """Held-out figures of the 16-bit model and of the one rounded to nearest; the model is as before."""
    base = measure(model.to(accelerator.device))
    dense = {name: model.get_submodule(name) for name in schemes}
    pack_nearest_codes(model, schemes)
    rounded = measure(model)
    for name, layer in dense.items():
        model.set_submodule(name, layer)
    model.to("cpu")
    log.info("held-out loss of the base: %.4f, rounded to nearest: %.4f", base["loss"], rounded["loss"])
    return base, rounded
