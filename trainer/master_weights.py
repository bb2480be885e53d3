"""Trained weights in 16 bits: the optimizer works on float32 copies of them (arXiv:1710.03740, section 3.1).

A step of full fine-tuning moves a weight by about the learning rate: 1e-4 of a weight of 0.02 is 0.5 %, a bfloat16
weight moves in steps of 0.4 to 0.8 %, and at 1e-5 it would never move. The copies take each step and are rounded into
the model. That costs 4 bytes a weight, as much as it saves to compute in 16 bits, and gives 16-bit kernels the
trajectory of float32 weights. LoRA factors are float32 and are left as they are.
"""

from typing import Any

import torch
from torch import nn

from trainer.config.errors import require
from trainer.optim import Optimizer


class MasterWeights:
    """An optimizer over 16-bit parameters that steps their float32 copies."""

    def __init__(self, optimizer: Optimizer) -> None:
        """optimizer  fresh, over the model's parameters; it is made to work on the copies of the 16-bit ones"""
        self._optimizer = optimizer
        self._masters: list[tuple[nn.Parameter, nn.Parameter]] = []
        for group in optimizer.param_groups:
            group["params"] = [self._master(param) for param in group["params"]]
        self.parts = (optimizer,)

    def _master(self, param: nn.Parameter) -> nn.Parameter:
        if param.dtype not in (torch.bfloat16, torch.float16):
            return param
        master = nn.Parameter(param.detach().float())
        self._masters.append((param, master))
        return master

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    @torch.no_grad()
    def step(self) -> None:
        for param, master in self._masters:
            master.grad = None if param.grad is None else param.grad.float()
        self._optimizer.step()
        for param, master in self._masters:
            param.copy_(master)
            master.grad = None

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()
        for param, _ in self._masters:
            param.grad = None

    def state_dict(self) -> dict[str, Any]:
        return {"optimizer": self._optimizer.state_dict(), "masters": [master.detach() for _, master in self._masters]}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict["optimizer"])
        for (param, master), saved in zip(self._masters, state_dict["masters"], strict=True):
            master.copy_(saved)
            param.copy_(master)


def with_master_weights(optimizer: Optimizer) -> Optimizer:
    """`optimizer`, over float32 copies if any of its parameters has 16 bits.

    optimizer  fresh: it has taken no step
    raises     UserError if such a parameter meets schedule-free averaging, which swaps weights in place
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if all(param.dtype not in (torch.bfloat16, torch.float16) for param in params):
        return optimizer
    require(
        "train_mode" not in optimizer.param_groups[0],
        "optim.name=adamw_schedule_free averages weights in place, and weights of 16 bits would round the average "
        "away; use model.dtype=float32, or optim.name=adamw with optim.schedule=wsd",
    )
    return MasterWeights(optimizer)
