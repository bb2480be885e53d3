"""The products of LoRA updates against float64, on three kinds of processor, and which calls use C++."""

import functools
import platform
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape, lora_products
from trainer.kernels.lora_products import Update

FLAGS = [(), ("-march=haswell",), ("-march=x86-64",)] if platform.machine() in ("x86_64", "AMD64") else [()]
# rows, in_features, out_features and rank of each projection. Rank 0 is a projection without an adapter.
CASES = [
    (0, 32, (8,), (2,)),
    (1, 1, (1,), (1,)),
    (1, 7, (3, 5), (3, 0)),
    (37, 101, (33, 70, 5), (1, 0, 17)),
    (130, 192, (96, 64), (8, 8)),
    (257, 96, (160,), (48,)),
    (64, 35, (67, 40), (70, 61)),
]


@dataclass
class Case:
    updates: list[Update]
    h: Tensor
    y: Tensor
    grad: Tensor
    grad_h: Tensor
    residual: Tensor

    def run(self, implementation: str) -> dict[str, Tensor]:
        """Everything, each product from the results of the products before it."""

        def call(name: str, *arguments: object) -> object:
            return getattr(lora_products, f"{name}{implementation}")(*arguments, self.updates)

        h_A = call("multiply_A", self.h)
        y, with_residual, grad_h = self.y.clone(), self.y.clone(), self.grad_h.clone()
        add = getattr(lora_products, f"add_update{implementation}")
        add(y, h_A, self.updates, None)
        add(with_residual, h_A, self.updates, self.residual)
        grad_h_A, grads_B = call("output_gradients", self.grad, h_A)
        call("add_input_gradient", grad_h, grad_h_A)
        grads_A = call("gradients_A", self.h, grad_h_A)
        results = {"h_A": h_A, "y": y, "with_residual": with_residual, "grad_h_A": grad_h_A, "grad_h": grad_h}
        results |= {f"grad_A{i}": grad for i, grad in enumerate(grads_A)}
        return results | {f"grad_B{i}": grad for i, grad in enumerate(grads_B)}


def case(
    rows: int, in_features: int, sizes: tuple[int, ...], ranks: tuple[int, ...], *, scale: float = 1.0, seed: int = 0
) -> Case:
    randn = functools.partial(torch.randn, generator=torch.Generator().manual_seed(seed))
    updates = [
        Update(n, s, randn(r, in_features), randn(n, r)) if r else Update(n, s, None, None)
        for n, r, s in zip(sizes, ranks, (2.0, -0.3, 0.7), strict=False)
    ]
    wide, thin = (rows, sum(sizes)), (rows, in_features)
    shapes = thin, wide, wide, thin, wide
    return Case(updates, *((scale * randn(shape)).bfloat16() for shape in shapes))


@pytest.fixture(params=FLAGS, ids=lambda flags: flags[0].removeprefix("-march=") if flags else "native")
def cpp(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The C++ library, compiled for one processor: AVX512-BF16 or what is here, AVX2, SSE2."""
    if _cpp.load("lora_products") is None:
        pytest.skip("no C++ compiler here")
    if request.param == ("-march=haswell",) and torch.backends.cpu.get_cpu_capability() == "DEFAULT":
        pytest.skip("this processor has no AVX2")
    flags = request.param
    monkeypatch.setattr(lora_products, "kernel", lambda file, name: _tape.kernel(file, name, *flags))


def assert_exact(got: Tensor, a: Tensor, b: Tensor, *, start: Tensor | None = None, scaling: float = 1.0) -> None:
    """got is start + scaling * a @ b, summed in float32 and rounded once to its dtype."""
    a, b = a.double(), b.double()
    exact, size = scaling * (a @ b), abs(scaling) * (a.abs() @ b.abs())
    if start is not None:
        exact, size = exact + start.double(), size + start.double().abs()
    # Half a place of bfloat16, and 2^-24 of all that was added at each addition of the sum.
    rounding = exact.abs() * (2**-8 if got.dtype == torch.bfloat16 else 2**-23)
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= rounding + (a.shape[1] + 2) * 2**-24 * size).all()


def rounded_B(update: Update) -> Tensor:
    return (update.lora_B * update.scaling).bfloat16()


def assert_all_exact(given: Case, got: dict[str, Tensor]) -> None:
    """Every product from the results that it was given."""
    column, rank, adapters, stacked_A = 0, 0, 0, []
    for update in given.updates:
        columns, ranks = slice(column, column + update.out_features), slice(rank, rank + update.rank)
        column, rank = columns.stop, ranks.stop
        if not update.rank:
            assert torch.equal(got["y"][:, columns], given.y[:, columns])
            continue
        A, grad = update.lora_A.bfloat16(), given.grad[:, columns]
        h_A, grad_h_A = got["h_A"][:, ranks], got["grad_h_A"][:, ranks]
        assert_exact(h_A, given.h, A.T)
        assert_exact(got["y"][:, columns], h_A, rounded_B(update).T, start=given.y[:, columns])
        assert_exact(grad_h_A, grad, rounded_B(update))
        assert_exact(got[f"grad_A{adapters}"], grad_h_A.T, given.h)
        assert_exact(got[f"grad_B{adapters}"], grad.T, h_A, scaling=update.scaling)
        stacked_A.append(A)
        adapters += 1
    assert torch.equal(got["with_residual"], got["y"] + given.residual)
    assert_exact(got["grad_h"], got["grad_h_A"], torch.cat(stacked_A), start=given.grad_h)


@pytest.mark.parametrize("shape", CASES, ids=str)
def test_cpu_is_exact(shape: tuple, cpp: None) -> None:
    given = case(*shape)
    got = given.run("_cpu")
    assert_all_exact(given, got)
    grads = [grad for name, grad in got.items() if name.startswith(("grad_A", "grad_B"))]
    factors = [f for name in ("lora_A", "lora_B") for u in given.updates if (f := getattr(u, name)) is not None]
    assert [(g.shape, g.dtype) for g in grads] == [(f.shape, torch.float32) for f in factors]


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_cpu_is_exact_for_tiny_and_huge_numbers(scale: float, cpp: None) -> None:
    given = case(*CASES[3], scale=scale)
    assert_all_exact(given, given.run("_cpu"))


@pytest.mark.parametrize("shape", CASES[1:], ids=str)
def test_cpu_rounds_as_the_reference(shape: tuple, cpp: None) -> None:
    given = case(*shape)
    h_A, y = (given.run("_cpu")[name] for name in ("h_A", "y"))
    of_torch = given.run("_reference")
    # Another order of a float32 sum moves a value across a rounding boundary in some 2^13 of all cases, or, in the sum
    # on top of h A^T, moved itself, a few times as often. A rounding left out moves a quarter of all.
    assert (h_A != of_torch["h_A"]).sum() <= max(1, h_A.numel() // 500)
    assert (y != of_torch["y"]).sum() <= max(y.shape[1], y.numel() // 100)


@pytest.mark.parametrize("shape", CASES[3:], ids=str)
def test_same_bits_for_any_number_of_threads(shape: tuple, cpp: None) -> None:
    given, threads = case(*shape), torch.get_num_threads()
    results = []
    try:
        for num_threads in (1, 2, 3, 2):
            torch.set_num_threads(num_threads)
            results.append(given.run("_cpu"))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(result[name], results[0][name]) for result in results[1:] for name in result)


def test_a_rows_bits_do_not_depend_on_the_others(cpp: None) -> None:
    given = case(*CASES[4])
    together = given.run("_cpu")
    for rows in (slice(0, 1), slice(5, 40), slice(129, 130)):
        tensors = (t[rows].contiguous() for t in (given.h, given.y, given.grad, given.grad_h, given.residual))
        alone = Case(given.updates, *tensors).run("_cpu")
        for name in ("h_A", "y", "with_residual", "grad_h_A", "grad_h"):
            assert torch.equal(alone[name], together[name][rows])


def test_zeros_leave_y_and_inf_stays_in_its_row_and_projection(cpp: None) -> None:
    given = case(5, 33, (20, 21), (3, 5))  # the ranks are odd: a pair of neighbours in h A^T has one of each projection
    zeros = [update._replace(lora_B=torch.zeros_like(update.lora_B)) for update in given.updates]
    y, h_A = given.y.clone(), lora_products.multiply_A_cpu(given.h, zeros)
    lora_products.add_update_cpu(y, h_A, zeros, None)
    assert torch.equal(y, given.y)

    h_A[2, 3] = torch.inf  # of the second projection
    lora_products.add_update_cpu(y, h_A, given.updates, None)
    assert (~y.isfinite()).nonzero().tolist() == [[2, column] for column in range(20, 41)]
    grad_h_A, (grad_B, other) = lora_products.output_gradients_cpu(given.grad, h_A, given.updates)
    assert grad_h_A.isfinite().all() and grad_B.isfinite().all()
    assert (~other.isfinite()).nonzero().tolist() == [[column, 0] for column in range(21)]

    given.h[1, 32] = torch.nan  # the last feature, alone in its pair
    h_A = lora_products.multiply_A_cpu(given.h, given.updates)
    assert h_A.isnan().nonzero()[:, 0].unique().tolist() == [1] and h_A[1].isnan().all()


def test_strided_residual() -> None:
    given = case(*CASES[3])
    if _cpp.load("lora_products") is None:
        pytest.skip("no C++ compiler here")
    got, want = given.y.clone(), given.y.clone()
    h_A = lora_products.multiply_A_cpu(given.h, given.updates)
    lora_products.add_update_cpu(got, h_A, given.updates, given.residual.T.contiguous().T)
    lora_products.add_update_cpu(want, h_A, given.updates, given.residual)
    assert torch.equal(got, want)


# ---- which calls use C++


def in_other_dtype(given: Case) -> Case:
    return Case(given.updates, *(t.half() for t in (given.h, given.y, given.grad, given.grad_h, given.residual)))


def with_factors(change: Callable[[Tensor], Tensor], given: Case) -> Case:
    updates = [u._replace(lora_A=change(u.lora_A), lora_B=change(u.lora_B)) for u in given.updates]
    return Case(updates, given.h, given.y, given.grad, given.grad_h, given.residual)


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (in_other_dtype, CASES[4]),
        (functools.partial(with_factors, torch.Tensor.bfloat16), CASES[4]),
        (functools.partial(with_factors, lambda factor: factor.T.contiguous().T), CASES[4]),
        (lambda given: given, (8, 32, (40, 300), (4, lora_products.MAX_RANKS))),
    ],
    ids=["float16", "bfloat16 factors", "strided factors", "many ranks"],
)
def test_torch_computes_the_rest(change: Callable[[Case], Case], shape: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    given = change(case(*shape))
    want = given.run("_reference")
    for name in ("multiply_A", "add_update", "output_gradients", "add_input_gradient", "gradients_A"):
        monkeypatch.setattr(lora_products, f"{name}_cpu", None)
    got = given.run("")
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_bfloat16_with_float32_factors_is_computed_in_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    if _cpp.load("lora_products") is None or not lora_products._pays():
        pytest.skip("no compiler here, or a processor where torch's products are faster")
    given = case(*CASES[4])
    monkeypatch.setattr(lora_products, "_scaled_B", None)
    monkeypatch.setattr(lora_products, "_stacked_A", None)
    assert_all_exact(given, given.run(""))
    monkeypatch.setenv("LOWBIT_KERNELS", "reference")
    with pytest.raises(TypeError, match="NoneType"):
        given.run("")
