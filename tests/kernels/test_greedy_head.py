"""Greedy tokens without logits: the argmax of packed_linear's logits, bit for bit, whatever the bounds meet."""

import platform
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels import greedy_head as module
from trainer.kernels.greedy_head import (
    GreedyHead,
    greedy_head,
    greedy_head_cpu,
    greedy_head_reference,
    pack_greedy_head,
)
from trainer.kernels.packed_linear import pack_linear, packed_linear

DTYPES = [torch.float32, torch.bfloat16]
# features and k that fill no panel, no four and no vector; one feature; one k; more than a panel and a part
SHAPES = [(1, 1), (63, 3), (64, 4), (65, 33), (1000, 70), (5000, 576), (700, 2050)]

pytestmark = pytest.mark.skipif(_cpp.load("greedy_head") is None, reason="no C++ compiler here")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pack(weight: Tensor, dtype: torch.dtype) -> GreedyHead:
    head = pack_greedy_head(pack_linear(weight, dtype=dtype))
    assert head is not None
    return head


def argmax(x: Tensor, head: GreedyHead) -> Tensor:
    """numpy's takes the first of equals."""
    return torch.from_numpy(packed_linear(x, head.head, out_dtype=torch.float32).numpy().argmax(-1))


def counts(x: Tensor, head: GreedyHead) -> Tensor:
    return greedy_head_cpu(x, head.head.weight, head.codes, head.bounds)[1]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_argmax_of_the_logits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    head = pack(random(*shape), dtype)
    for rows in (1, 2, 3, 4, 17):
        x = random(rows, shape[1], seed=rows).to(dtype)
        assert torch.equal(greedy_head(x, head), argmax(x, head))
        assert torch.equal(greedy_head_reference(x, head.head), argmax(x, head))


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_codes_alone_would_get_wrong(dtype: torch.dtype) -> None:
    """Features that agree within the rounding to 8 bits, so that only exact logits tell them apart."""
    weight = random(1, 192) + random(3000, 192, seed=1) * 2e-3
    head, x = pack(weight, dtype), random(24, 192, seed=2).to(dtype)
    codes = head.codes.transpose(1, 2).reshape(-1, 192)[:3000].float() - 128
    estimated = (x.float() @ (codes * head.bounds[0, :3000, None]).T).argmax(-1)
    want = argmax(x, head)
    assert (estimated != want).sum() >= 12  # half of the rows at least, or the bounds are not tested
    assert torch.equal(greedy_head(x, head), want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("winner", "rival"), [(0, 399), (399, 0), (130, 131)])
def test_bounds_hold_where_all_errors_add_up(winner: int, rival: int, dtype: torch.dtype) -> None:
    """Every code of the winner is off by 31/64 in the direction of x, as far as Cauchy-Schwarz allows: 310 in all. The
    rival's codes are exact and its logit is 288 above the winner's estimate, so bounds below 93 % of that would
    rule the winner out. Small integers and 31/64 are exact in bfloat16."""
    x = random(640).sign()
    x[0] = 1.0
    near = random(640, seed=1).clamp(-1, 1).round()
    weight = random(400, 640, seed=2)
    weight[winner] = near + x * 31 / 64
    weight[rival] = near + x * (torch.arange(640) % 20 < 9)
    weight[:, 0] = 127.0  # the largest of each feature: scales of 1
    head, rows = pack(weight, dtype), torch.stack([x, random(640, seed=3)]).to(dtype)
    logits = packed_linear(rows, head.head, out_dtype=torch.float32)[0]
    assert 15 < logits[winner] - logits[rival] < 25
    assert greedy_head(rows, head)[0] == winner
    head.bounds[1] *= 0.9
    assert greedy_head(rows, head)[0] == rival  # or this test would accept any bound


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1.0, 1e12, 1e30])
def test_scales_and_outliers(scale: float, dtype: torch.dtype) -> None:
    weight = random(900, 100) * random(900, 1, seed=1).exp()
    weight[17] = 0
    head, x = pack(weight, dtype), random(8, 100, seed=2)
    x[:, 5] *= 1000  # as hidden states have them
    x[0] = 0
    x = (x * scale).to(dtype)
    assert torch.equal(greedy_head(x, head), argmax(x, head))
    small = pack(weight * 1e-38, dtype)  # scales below the smallest normal number
    assert torch.equal(greedy_head(x, small), argmax(x, small))


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_first_of_equals(dtype: torch.dtype, threads: Callable) -> None:
    weight = random(3000, 96)
    weight[2500] = weight[1900] = weight[70] * 1.0
    x = (weight[70:71] * 3).repeat(4, 1).to(dtype)
    head = pack(weight, dtype)
    for num_threads in (1, 2, 5):
        threads(num_threads)
        assert greedy_head(x, head).tolist() == [70] * 4


def test_rows_that_nothing_rules_out_are_computed_in_full() -> None:
    """All features alike, and no x at all: every logit is equal, and the lists of candidates are too short for that."""
    alike = pack(random(1, 64).repeat(20_000, 1), torch.bfloat16)
    x = random(3, 64, seed=1).bfloat16()
    assert greedy_head(x, alike).tolist() == [0] * 3 and counts(x, alike).tolist() == [20_000] * 3
    head = pack(random(20_000, 64), torch.bfloat16)
    x[1] = 0
    assert greedy_head(x, head)[1] == 0 and counts(x, head)[1] == 20_000


def test_few_logits_are_computed() -> None:
    """Independent features, where the largest of 20,000 stands 4 standard deviations out and the next ones 0.2 below;
    the bound is 0.01 of |x| |w|, 0.3 standard deviations of a logit: some 10 candidates, far from the 200 allowed."""
    head = pack(random(20_000, 576), torch.bfloat16)
    found = counts(random(32, 576, seed=1).bfloat16(), head)
    assert found.min() >= 1 and found.max() < 200


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_that_are_not_finite(dtype: torch.dtype) -> None:
    head = pack(random(300, 40), dtype)
    x = random(6, 40, seed=1).to(dtype)
    clean = greedy_head(x, head)
    x[1, 39], x[3, 0], x[4, 2] = float("nan"), float("inf"), float("-inf")
    for tokens in (greedy_head(x, head), greedy_head_reference(x, head.head)):
        assert tokens[[1, 3, 4]].tolist() == [-1] * 3
        assert torch.equal(tokens[[0, 2, 5]], clean[[0, 2, 5]])
    x = torch.full((1, 40), 3e38).to(dtype)  # finite, but its logits are not
    assert greedy_head(x, head).tolist() == greedy_head_reference(x, head.head).tolist() == [-1]


def test_where_logits_are_the_way() -> None:
    weight = random(100, 40)
    assert pack_greedy_head(pack_linear(weight, dtype=torch.float16)) is None
    weight[99, 3] = float("inf")
    assert pack_greedy_head(pack_linear(weight, dtype=torch.float32)) is None
    assert pack_greedy_head(pack_linear(torch.zeros(1, module.MAX_IN_FEATURES + 1), dtype=torch.float32)) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_token_in_every_batch(dtype: torch.dtype, threads: Callable) -> None:
    head, x = pack(random(2000, 128), dtype), random(40, 128, seed=1).to(dtype)
    threads(1)
    full = greedy_head(x, head)
    for num_threads in (1, 2, 3):
        threads(num_threads)
        for rows in (1, 2, 3, 5, 16, 40):
            assert torch.equal(greedy_head(x[:rows], head), full[:rows])
            assert torch.equal(greedy_head(x[-rows:], head), full[-rows:])


def test_a_tape_replays_with_new_inputs() -> None:
    head, x = pack(random(500, 64), torch.bfloat16), random(2, 64, seed=1).bfloat16()
    tape = _tape.Tape()
    with tape.record():
        tokens = greedy_head(x, head)
    x.copy_(random(2, 64, seed=2))
    tape.replay()
    assert torch.equal(tokens, argmax(x, head))


@pytest.mark.skipif(platform.machine() != "x86_64", reason="flags of x86")
@pytest.mark.parametrize("processor", ["haswell", "x86-64"])
def test_builds_for_other_processors(processor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if processor == "haswell" and "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this machine cannot run haswell")
    function, native = _tape.kernel("greedy_head", "greedy_head", f"-march={processor}"), _tape.kernel
    monkeypatch.setattr(_tape, "kernel", lambda file, name: function if file == "greedy_head" else native(file, name))
    for dtype in DTYPES:
        for shape in SHAPES:
            head = pack(random(*shape), dtype)
            for rows in (1, 5):
                x = random(rows, shape[1], seed=rows).to(dtype)
                assert torch.equal(greedy_head(x, head), argmax(x, head))


def test_opcheck_and_compile() -> None:
    head, x = pack(random(200, 48), torch.bfloat16), random(3, 48, seed=1).bfloat16()
    arguments = (x, head.head.weight, head.codes, head.bounds)
    torch.library.opcheck(torch.ops.lowbit.greedy_head, arguments)
    compiled = torch.compile(lambda *a: torch.ops.lowbit.greedy_head(*a) + 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(*arguments), argmax(x, head) + 1)


def test_the_reference_runs_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    head, x = pack(random(200, 48), torch.bfloat16), random(3, 48, seed=1).bfloat16()
    want = argmax(x, head)
    monkeypatch.setenv("LOWBIT_KERNELS", "reference")
    assert torch.equal(greedy_head(x, head), want)


def test_memory() -> None:
    """8 bits a weight and three float32 a feature beside the head; no rows, no work."""
    head = pack(random(128, 64), torch.bfloat16)
    assert head.nbytes == 128 * 64 + 128 * 12
    assert greedy_head(torch.zeros(0, 64, dtype=torch.bfloat16), head).shape == (0,)


def test_errors_name_the_argument() -> None:
    head = pack(random(128, 64), torch.bfloat16)
    with pytest.raises(ValueError, match=r"x is torch.bfloat16 \(2, 63\); this head takes contiguous .*\[R, 64\]"):
        greedy_head(random(2, 63).bfloat16(), head)
    with pytest.raises(ValueError, match="x is torch.float32"):
        greedy_head(random(2, 64), head)
    with pytest.raises(ValueError, match="contiguous"):
        greedy_head(random(64, 2).bfloat16().T, head)
