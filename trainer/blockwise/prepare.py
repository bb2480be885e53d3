"""From a 16-bit model to one whose scales are trained: codes chosen block by block, or the nearest ones.

The two phases of EfficientQAT (arXiv:2407.11062): Block-AP (blocks.py) fixes the codes, E2E-QP (scales.py)
trains what is left on the model's own loss, in the one loop. Afterwards there are no 16-bit weights to go back to, so
what the model lost by plain rounding is measured here.
"""

import logging
from collections.abc import Mapping
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
from trainer.evaluate.perplexity import held_out_loss
from trainer.linear import QuantLinear
from trainer.objective import NextTokenLoss
from trainer.qat.prepare import layer_schemes
from trainer.qat.scheme import Scheme

log = logging.getLogger(__name__)


def prepare_scales(
    model: PreTrainedModel,
    dataset: Dataset,
    held_out: Dataset,
    config: Config,
    run_dir: Path,
    accelerator: Accelerator,
    *,
    max_pass_tokens: int,
    measure: bool,
) -> tuple[float, float] | None:
    """Pack the layers that have a scheme and train their scales from now on, in place.

    One process trains the blocks; the others, and a resumed run, read them.

    measure  whether held-out losses before are wanted: in 16 bits, and rounded to nearest
    returns  these two, in nats a target token
    raises   UserError for what blocks or schemes cannot have
    """
    schemes = layer_schemes(model, config.qat)
    by_block(schemes, model.config.num_hidden_layers)
    losses = _losses_before(model, schemes, held_out, config, accelerator) if measure else None
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
    return losses


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


def _losses_before(
    model: PreTrainedModel, schemes: Mapping[str, Scheme], held_out: Dataset, config: Config, accelerator: Accelerator
) -> tuple[float, float]:
    """Held-out loss of the 16-bit model and of the one rounded to nearest; the model is as before."""
    objective = NextTokenLoss(model.to(accelerator.device))
    base = held_out_loss(objective, held_out, accelerator, batch_size=config.train.eval_batch_size)
    dense = {name: model.get_submodule(name) for name in schemes}
    pack_nearest_codes(model, schemes)
    rounded = held_out_loss(objective, held_out, accelerator, batch_size=config.train.eval_batch_size)
    for name, layer in dense.items():
        model.set_submodule(name, layer)
    model.to("cpu")
    log.info("held-out loss of the base: %.4f, rounded to nearest: %.4f", base, rounded)
    return base, rounded
