"""What calibration keeps does not depend on how rows are cut into passes."""

import pytest
import torch

from trainer.blockwise.activation_stream import ActivationStream
from trainer.ptq.block import Streams
from trainer.ptq.statistics import SAMPLE_TOKENS


@pytest.mark.parametrize("num_rows", [None, 40])
def test_the_tokens_that_are_kept(num_rows):
    lengths = torch.randint(1, 200, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    inputs = ActivationStream(lengths, 1, torch.float32)
    inputs.values[:, 0] = torch.arange(len(inputs.values))

    def kept(max_tokens: int) -> torch.Tensor:
        streams = Streams(inputs, None, max_tokens=max_tokens)
        device = torch.device("cpu")
        return torch.cat(
            [
                inputs.take(rows, device)[streams.sample(rows, num_rows=num_rows)]
                for rows in streams.passes(num_rows=num_rows)
            ]
        )[:, 0]

    whole, total = kept(1 << 20), sum(lengths[:num_rows])
    assert SAMPLE_TOKENS <= len(whole) < 2 * SAMPLE_TOKENS < total
    assert len(set(whole.diff().tolist())) == 1 and whole[-1] < total  # evenly spread over all rows
    assert torch.equal(kept(1), whole) and torch.equal(kept(333), whole)
