"""The tape: what was recorded runs again on the same tensors."""

import gc
import weakref

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels.embedding import embed_tokens
from trainer.kernels.rms_norm import add_rms_norm, rms_norm
from trainer.kernels.rope import rope_
from trainer.kernels.swiglu import swiglu

pytestmark = pytest.mark.skipif(_cpp.load("elementwise") is None, reason="no C++ compiler here")


class Layer:
    """Embedding, norm, rotation, SwiGLU and a norm with residual: every op of the file, integers and floats."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.embedding = torch.randn(11, 64, generator=generator)
        self.weight = torch.randn(64, generator=generator)
        self.narrow = torch.randn(32, generator=generator)
        self.cos_sin = torch.randn(5, 2, 4, generator=generator)

    def __call__(self, token_ids: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        x = rms_norm(embed_tokens(token_ids, self.embedding), self.weight, eps=1e-5)
        rope_(x, positions, self.cos_sin, num_heads=4, num_kv_heads=2, head_dim=8)
        y = swiglu(x)
        return add_rms_norm(y, y, self.narrow, eps=1e-6)


def test_replay_equals_eager_on_new_inputs() -> None:
    layer, tape = Layer(), _tape.Tape()
    token_ids, positions = torch.tensor([1, 2, 3]), torch.tensor([0, 1, 2])
    with tape.record():
        outputs = layer(token_ids, positions)
    assert len(tape) == 5
    assert all(map(torch.equal, outputs, layer(token_ids, positions)))  # recording runs the calls as well
    recorded = outputs[0].clone()
    token_ids.copy_(torch.tensor([10, 0, 7]))
    positions.copy_(torch.tensor([4, 3, 0]))
    tape.replay()
    assert all(map(torch.equal, outputs, layer(token_ids, positions)))
    assert not torch.equal(outputs[0], recorded)
    tape.replay()  # in-place ops start from tensors that the tape fills itself
    assert all(map(torch.equal, outputs, layer(token_ids, positions)))
    assert len(tape) == 5  # neither replaying nor calling outside adds to it


def test_a_tape_keeps_its_tensors() -> None:
    x, weight, tape = torch.randn(2, 8), torch.randn(8), _tape.Tape()
    with tape.record():
        middle = rms_norm(x, weight, eps=1e-5)
        y = swiglu(middle)
    kept = [weakref.ref(tensor) for tensor in (x, weight)]  # middle lies in the pool, whose memory stays
    want = y.clone()
    del x, weight, middle
    gc.collect()
    assert all(reference() is not None for reference in kept)
    y.zero_()
    tape.replay()
    assert torch.equal(y, want)
    del tape
    gc.collect()
    assert all(reference() is None for reference in kept)


def test_the_pool_hands_memory_out_again_when_nothing_uses_it() -> None:
    pool = _tape.Pool()
    x = torch.randn(4, 64)
    weight = torch.ones(64)

    def deep(x: Tensor, layers: int) -> Tensor:
        for _ in range(layers):
            x = rms_norm(x, weight, eps=1e-5)
        return x

    with _tape.Tape(pool).record():
        deep(x, 2)
    needed = pool.nbytes
    tape = _tape.Tape(pool)
    with tape.record():
        y = deep(x, 50)
    assert pool.nbytes == needed == 2 * x.nbytes  # what is read and what is written, never the layers before
    want = deep(x.mul_(3).add_(1), 50)
    tape.replay()
    assert torch.equal(y, want)


def test_the_pool_keeps_what_only_a_view_uses() -> None:
    pool = _tape.Pool()
    view = pool.take((4, 8), torch.float32)[1:]
    assert pool.take((4, 8), torch.float32).untyped_storage().data_ptr() != view.untyped_storage().data_ptr()
    address = view.untyped_storage().data_ptr()
    del view
    assert pool.take((4, 8), torch.float32).untyped_storage().data_ptr() == address


def test_a_tape_is_recorded_once_and_alone() -> None:
    x, tape, other = torch.ones(1, 2), _tape.Tape(), _tape.Tape()
    with pytest.raises(AssertionError, match="record first"):
        tape.replay()
    with tape.record():
        with pytest.raises(AssertionError, match="recorded once, alone"), other.record():
            pass
        swiglu(x)
    with pytest.raises(AssertionError, match="recorded once, alone"), tape.record():
        pass
    assert (len(tape), len(other)) == (1, 0)


def test_after_an_exception_no_tape_records_and_it_can_be_tried_again() -> None:
    x, bad, tape = torch.ones(1, 2), torch.ones(1, 3), _tape.Tape()
    with pytest.raises(ValueError, match="gate_up is"), tape.record():
        swiglu(x)
        swiglu(bad)
    swiglu(x)
    assert len(tape) == 0
    with pytest.raises(AssertionError, match="record first"):
        tape.replay()
    with tape.record():
        y = swiglu(x)
    x.fill_(2)
    tape.replay()
    assert len(tape) == 1 and torch.equal(y, swiglu(x))


def test_torch_operations_are_refused_while_recording() -> None:
    """They would run once and be left out of every replay."""
    x, half = torch.ones(2, 8), torch.ones(2, 8, dtype=torch.float16)
    for operation in (lambda: x + 1, lambda: x.copy_(x), lambda: torch.zeros(3), lambda: swiglu(half)):
        tape = _tape.Tape()
        with pytest.raises(AssertionError, match="cannot be recorded on a tape"), tape.record():
            operation()
    tape = _tape.Tape()
    with tape.record():  # memory and views are no computation
        y = swiglu(torch.empty(4, 8)[1:3].view(2, 8))
    assert y.shape == (2, 4) and len(tape) == 1


def test_arguments_travel_unchanged() -> None:
    """A float as the bits of a double, None as 0, integers with their sign, then the number of threads."""
    seen = []

    def function(packed: bytes) -> None:
        seen.extend(torch.frombuffer(bytearray(packed), dtype=torch.int64).tolist())

    x = torch.ones(2)
    _tape.call(function, x, -3, None, 0.1, 2**62)
    bits = torch.tensor(0.1, dtype=torch.float64).view(torch.int64).item()
    assert seen == [x.data_ptr(), -3, 0, bits, 2**62, torch.get_num_threads()]
