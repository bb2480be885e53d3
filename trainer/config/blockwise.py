"""`blockwise.*`: training one transformer block after the other on its own outputs (EfficientQAT, arXiv:2407.11062)."""

from dataclasses import dataclass
from enum import StrEnum

from trainer.config.errors import require


class BlockInputs(StrEnum):
    quantized = "quantized"
    original = "original"


class BlockLoss(StrEnum):
    mse = "mse"
    relative = "relative"


@dataclass
class BlockwiseConfig:
    epochs: int = 0
    """Passes over the rows for each block; 0 leaves the phase out."""
    rows: int | None = 512
    """Training rows that the blocks see, `val_rows` included; null for all."""
    val_rows: int = 32
    """Of these, rows that no step sees: a block whose error on them does not fall keeps its nearest codes."""
    batch_size: int = 8
    """Rows of one step."""
    inputs: BlockInputs = BlockInputs.quantized
    """What a block is trained on: quantized (what the blocks before it give once they are quantized, as in the paper)
    or original (what they gave in 16 bits). The target is the 16-bit block's output after 16-bit blocks in both."""
    loss: BlockLoss = BlockLoss.relative
    """mse (the paper's: mean squared error over tokens and channels) or relative (each token's squared error over its
    squared length: the next norm takes the length out, and a few tokens of great length would be all that counts)."""
    weight_lr: float = 3e-4
    """Adam's rate for weights; it falls to a twentieth along a cosine in each block. The paper uses 1e-5 to 2e-5 for
    4,096 steps a block, models of 7B and more; a block has tens of steps by default."""
    scale_lr: float = 1e-4
    """Adam's rate for scales, and for zero points where they are learned: those seldom move by half a code within the
    tens of steps of a block, and then nothing changes."""
    activations_mb: int = 2048
    """MiB of memory for inputs and targets of a block, two bytes a value in 16 bits; what is more is put on disk, in
    the run folder, while the phase runs."""

    def __post_init__(self) -> None:
        for name, least in (("epochs", 0), ("val_rows", 1), ("batch_size", 1), ("activations_mb", 0)):
            value = getattr(self, name)
            require(value >= least, f"blockwise.{name}={value}; give {least} or more")
        require(
            self.rows is None or self.rows > self.val_rows,
            f"blockwise.rows={self.rows} leaves no row to train on beside blockwise.val_rows={self.val_rows}; give "
            "more rows, or null for all",
        )
        for name in ("weight_lr", "scale_lr"):
            value = getattr(self, name)
            require(0 < value < 1, f"blockwise.{name}={value}; give a number between 0 and 1")
        changed = [name for name, value in vars(self).items() if value != type(self).__dict__[name]]
        require(
            self.epochs > 0 or not changed,
            f"blockwise.{changed[0] if changed else ''} has no effect with blockwise.epochs=0; give epochs, or use "
            "conf=qat_blocks",
        )
