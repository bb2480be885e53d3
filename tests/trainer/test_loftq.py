"""LoftQ: codes and factors that together are closer to the weight, for every alpha, codebook and layer."""

import json
import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.config.errors import UserError
from trainer.config.lora import LoftqConfig, LoraConfig
from trainer.linear import QuantLinear, quantize_linears, weights_sha256
from trainer.loftq import Loftq, fit_codes, fit_layer, measure_input_scales
from trainer.lora import LoraLinear, attach_lora
from trainer.objective import NextTokenLoss
from trainer.quantizer import Quantizer
from trainer.svd import EXACT_RANKS, EXACT_SIZE, truncated_svd

RANK = 16


@pytest.fixture(scope="module")
def weight() -> Tensor:
    """Rows of 200 cross blocks of 64; the scale is that of a trained layer."""
    return 0.02 * torch.randn(144, 200, generator=torch.Generator().manual_seed(0))


def small_llama(num_layers: int = 2, hidden_size: int = 96) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 2,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config).requires_grad_(False).eval()


def pack(model: nn.Module, loftq: Loftq | None = None, quantizer: Quantizer | None = None) -> None:
    hook = {} if loftq is None else {"pack": loftq}
    quantize_linears(model, quantizer or Quantizer(), skip={model.lm_head}, **hook)


def error(weight: Tensor, fit: object, scaling: float, scale: Tensor | float = 1.0) -> float:
    """||(W - (Q + s B A)) diag(scale)||, in float64 and from what a layer would hold."""
    dense = fit.quantized.dequantize(torch.float32).double() + scaling * fit.lora_B.double() @ fit.lora_A.double()
    return ((weight.double() - dense) * scale).norm().item()


def plain_error(weight: Tensor, quantizer: Quantizer) -> float:
    return (weight.double() - quantizer.quantize(weight).dequantize(torch.float32).double()).norm().item()


# ---- the fit


@pytest.mark.parametrize("iterations", [1, 5])
@pytest.mark.parametrize("scaling", [0.25, 1.0, 2.0, 4.0, 32 / RANK**0.5])
def test_the_error_falls_at_every_alpha(weight: Tensor, scaling: float, iterations: int) -> None:
    """alpha = r/4, r, 2r, 4r, and alpha = 2r with rsLoRA: the update is the same one whatever it is scaled by."""
    quantizer = Quantizer()
    fit = fit_layer(weight, quantizer, rank=RANK, scaling=scaling, iterations=iterations)
    unscaled = fit_layer(weight, quantizer, rank=RANK, scaling=1.0, iterations=iterations)
    assert error(weight, fit, scaling) < 0.95 * plain_error(weight, quantizer)  # 0.87 and 0.78 on this weight
    # sums in float32, of which a later iterate's rounding may make other codes: 1e-3 is a tenth of an iteration's gain
    assert error(weight, fit, scaling) == pytest.approx(
        error(weight, unscaled, 1.0), rel=1e-5 if iterations == 1 else 1e-3
    )


def test_factors_without_the_scaling_gain_nothing_at_alpha_2r(weight: Tensor) -> None:
    """The fault that ours does not have, from the factors that the reference and PEFT write: those of s = 1."""
    quantizer, plain = Quantizer(), plain_error(weight, Quantizer())
    theirs = fit_layer(weight, quantizer, rank=RANK, scaling=1.0, iterations=1)
    assert error(weight, theirs, 2.0) == pytest.approx(plain, rel=1e-6)  # ||E - 2 E_r|| = ||E||, float32 factors
    assert error(weight, theirs, 4.0) > plain
    ours = fit_layer(weight, quantizer, rank=RANK, scaling=4.0, iterations=1)
    assert error(weight, ours, 4.0) < 0.95 * plain


def test_one_iteration_is_the_truncated_svd_over_the_nearest_codes(weight: Tensor) -> None:
    quantizer = Quantizer()
    fit = fit_layer(weight, quantizer, rank=RANK, scaling=2.0, iterations=1)
    nearest = quantizer.quantize(weight)
    assert torch.equal(fit.quantized.packed, nearest.packed) and torch.equal(fit.quantized.absmax, nearest.absmax)
    U, S, Vt = torch.linalg.svd(weight.double() - nearest.dequantize(torch.float32).double(), full_matrices=False)
    best = (U[:, :RANK] * S[:RANK]) @ Vt[:RANK]
    # 16 of 144 directions: the eigenvectors in float64 are exact, the factors are rounded to float32
    torch.testing.assert_close(2.0 * (fit.lora_B @ fit.lora_A).double(), best, rtol=1e-4, atol=1e-4 * best.abs().max())
    assert error(weight, fit, 2.0) == pytest.approx(S[RANK:].norm().item(), rel=1e-6)  # Eckart-Young
    # both factors carry the root of the singular values, so that they learn at one rate
    torch.testing.assert_close(fit.lora_A.norm(dim=1), fit.lora_B.norm(dim=0), rtol=1e-4, atol=0)


def test_iterations_follow_algorithm_1(weight: Tensor) -> None:
    """Against the alternation written out in float64 with numpy's order of things."""
    quantizer, scaling, update, errors = Quantizer(), 0.5, torch.zeros_like(weight).double(), []
    for _ in range(3):
        dense = quantizer.quantize((weight.double() - update).float()).dequantize(torch.float32).double()
        U, S, Vt = torch.linalg.svd(weight.double() - dense, full_matrices=False)
        update = (U[:, :RANK] * S[:RANK]) @ Vt[:RANK]
        errors.append((weight.double() - dense - update).norm().item())
    for iterations in (1, 2, 3):
        fit = fit_layer(weight, quantizer, rank=RANK, scaling=scaling, iterations=iterations)
        # a code on a threshold may fall the other way in float32: far less than the 4 % that iterations differ
        assert fit.error == pytest.approx(min(errors[:iterations]), rel=1e-3)
    assert errors[2] < 0.97 * errors[0]


def test_the_best_iterate_is_kept() -> None:
    """At 2 bits errors do not fall with each iteration; what comes back is the smallest, and its own codes."""
    weight = 0.02 * torch.randn(64, 96, generator=torch.Generator().manual_seed(3))
    quantizer = Quantizer("nf2")
    fits = [fit_layer(weight, quantizer, rank=8, scaling=2.0, iterations=n) for n in range(1, 13)]
    for previous, fit in zip(fits, fits[1:], strict=False):
        assert fit.error <= previous.error
        if fit.iteration == previous.iteration:
            assert torch.equal(fit.quantized.packed, previous.quantized.packed)
    assert fits[-1].iteration < 12, "every iterate was better than the last; take a weight where one is not"
    for fit in fits:
        assert error(weight, fit, 2.0) == pytest.approx(fit.error, rel=1e-5)  # float32 sums
        assert fit.error_plain == pytest.approx(plain_error(weight, quantizer), rel=1e-5)


@pytest.mark.parametrize(
    "quantizer",
    [
        Quantizer("nf4", 64, False),
        Quantizer("nf4", 128),
        Quantizer("fp4"),
        Quantizer("nf3"),
        Quantizer("nf2"),
        Quantizer("int4", group_size=-1),
        Quantizer("int8"),
    ],
    ids=lambda quantizer: f"{quantizer.codebook}-{quantizer.block_size}-{quantizer.double_quant}",
)
def test_every_base_gains(weight: Tensor, quantizer: Quantizer) -> None:
    one = fit_layer(weight, quantizer, rank=RANK, scaling=2.0, iterations=1)
    five = fit_layer(weight, quantizer, rank=RANK, scaling=2.0, iterations=5)
    plain = plain_error(weight, quantizer)
    assert one.error < 0.95 * plain and five.error <= one.error  # a random residual's 16 of 144 directions hold 25 %
    assert error(weight, five, 2.0) == pytest.approx(five.error, rel=1e-4)


def test_weights_in_16_bits_of_any_strides(weight: Tensor) -> None:
    half = weight.bfloat16()
    fit = fit_layer(half, Quantizer(), rank=RANK, scaling=2.0, iterations=2)
    turned = fit_layer(half.T.contiguous().T, Quantizer(), rank=RANK, scaling=2.0, iterations=2)
    assert torch.equal(fit.quantized.packed, turned.quantized.packed)
    assert error(half.float(), fit, 2.0) < 0.95 * plain_error(half.float(), Quantizer())


def test_a_rank_above_the_residuals(weight: Tensor) -> None:
    """A thin layer has fewer directions than the rank: the fit is exact to float32, and only real ones come back."""
    thin = weight[:8]
    fit = fit_layer(thin, Quantizer(), rank=RANK, scaling=2.0, iterations=1)
    assert fit.lora_A.shape == (8, 200) and fit.lora_B.shape == (8, 8)
    assert fit.error < 1e-5 * fit.error_plain


def test_inf_and_nan_are_refused(weight: Tensor) -> None:
    broken = weight.clone()
    broken[3, 5] = math.nan
    with pytest.raises(ValueError, match=r"weight\[3, 5\].* is nan"):
        fit_layer(broken, Quantizer(), rank=4, scaling=1.0, iterations=2)


# ---- the truncated SVD


@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (64, 64), (1, 7)])
def test_the_exact_svd(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    U, S, Vt = truncated_svd(matrix, rank=32)
    k = min(32, *shape)
    assert U.shape == (shape[0], k) and S.shape == (k,) and Vt.shape == (k, shape[1])
    torch.testing.assert_close(S.double(), torch.linalg.svdvals(matrix.double())[:k], rtol=1e-6, atol=0)
    torch.testing.assert_close(U.T @ U, torch.eye(k), rtol=0, atol=1e-5)
    torch.testing.assert_close(Vt @ Vt.T, torch.eye(k), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "rank"),
    [((EXACT_SIZE + 76, EXACT_SIZE + 6), 8), ((EXACT_SIZE + 6, EXACT_SIZE + 76), 80), ((160, 700), 8)],
)
def test_the_randomized_svd_is_within_a_thousandth(shape: tuple[int, int], rank: int) -> None:
    """Of a real residual, whose singular values hardly fall: the hardest spectrum there is for it."""
    assert min(shape) > min(EXACT_SIZE, EXACT_RANKS * rank)
    weight = 0.02 * torch.randn(shape, generator=torch.Generator().manual_seed(1))
    residual = weight - Quantizer().quantize(weight).dequantize(torch.float32)
    state = torch.random.get_rng_state()
    U, S, Vt = truncated_svd(residual, rank=rank)
    left = (residual - (U * S) @ Vt).double().square().sum()
    squares = torch.linalg.eigvalsh(residual.double() @ residual.double().T)
    assert left.sqrt() < 1.001 * squares[:-rank].sum().sqrt()
    assert torch.equal(state, torch.random.get_rng_state())  # the order of data and dropout must not move
    assert all(torch.equal(a, b) for a, b in zip((U, S, Vt), truncated_svd(residual, rank=rank), strict=True))


# ---- weighting by inputs


def test_the_weighted_error_is_what_is_minimised(weight: Tensor) -> None:
    scale = torch.linspace(0.1, 3.0, 200)
    quantizer = Quantizer()
    plain = fit_layer(weight, quantizer, rank=RANK, scaling=2.0, iterations=1)
    weighted = fit_layer(weight, quantizer, rank=RANK, scaling=2.0, iterations=1, input_scale=scale)
    residual = (weight - quantizer.quantize(weight).dequantize(torch.float32)).double() * scale
    best = torch.linalg.svdvals(residual)[RANK:].norm().item()  # no update of this rank has less
    assert weighted.error == pytest.approx(best, rel=1e-5) and error(weight, weighted, 2.0, scale) == pytest.approx(
        best, rel=1e-5
    )
    assert error(weight, plain, 2.0, scale) > 1.005 * best
    assert weighted.error_plain == pytest.approx(residual.norm().item(), rel=1e-5)


@torch.no_grad()
def test_input_scales_are_the_root_mean_squares_of_what_layers_see() -> None:
    model = small_llama()
    rows = [[1, 2, 3, 4, 5], [7, 8, 9]]
    scales = measure_input_scales(model, rows)
    assert scales.keys() == {name for name, layer in model.named_modules() if type(layer) is nn.Linear} - {"lm_head"}
    norm = model.model.layers[0].input_layernorm
    x = torch.cat([norm(model.model.embed_tokens(torch.tensor(row))) for row in rows]).double()
    squares = x.square().mean(0)
    want = ((squares / squares.mean() + 0.01) / 1.01).sqrt().float()
    torch.testing.assert_close(scales["model.layers.0.self_attn.k_proj"], want, rtol=1e-5, atol=0)
    assert not any(layer._forward_pre_hooks for layer in model.modules())  # nothing is left behind


def test_input_scales_lower_the_error_of_the_outputs() -> None:
    """On the rows that were measured, the layers' outputs are closer than with the unweighted fit."""
    model, rows = small_llama(), [list(range(1, 60)), list(range(5, 50, 3))]
    with torch.no_grad():
        for layer in model.model.layers:  # a trained model's channels differ much more than random ones
            layer.input_layernorm.weight.copy_(torch.linspace(0.05, 3, 96).exp() / 5)
    scales = measure_input_scales(model, rows)
    name = "model.layers.0.self_attn.q_proj"
    weight, seen = model.get_submodule(name).weight, []
    model.get_submodule(name).register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0][0]))
    for row in rows:
        model.model(input_ids=torch.tensor([row]))
    x = torch.cat(seen)

    def output_error(scale: Tensor | None) -> float:
        fit = fit_layer(weight, Quantizer("nf2"), rank=8, scaling=2.0, iterations=1, input_scale=scale)
        dense = fit.quantized.dequantize(torch.float32) + 2.0 * fit.lora_B @ fit.lora_A
        return (x @ (weight - dense).T).norm().item()

    assert output_error(scales[name]) < 0.97 * output_error(None)


def test_a_silent_layer_is_weighted_alike() -> None:
    model = small_llama()
    model.model.layers[0].input_layernorm.weight.data.zero_()
    scales = measure_input_scales(model, [[1, 2, 3]])
    assert torch.equal(scales["model.layers.0.self_attn.q_proj"], torch.ones(96))


# ---- over a model


def fitted(
    iterations: int = 5, lora: LoraConfig | None = None, **settings: object
) -> tuple[nn.Module, nn.Module, Loftq]:
    """The 16-bit model, the PEFT model that starts by LoftQ, and how it went."""
    lora = lora or LoraConfig(rank=8, alpha=16)
    dense, model = small_llama(), small_llama()
    loftq = Loftq(LoftqConfig(iterations=iterations, **settings), lora)
    pack(model, loftq)
    loftq.finish()
    return dense, attach_lora(model, lora, seed=0, start=loftq.factors), loftq


@torch.no_grad()
def test_a_model_starts_closer_to_its_16_bit_self() -> None:
    dense, model, loftq = fitted()
    plain = small_llama()
    pack(plain)
    input_ids = torch.arange(40).view(2, 20)
    want = dense(input_ids=input_ids).logits
    distance = (model(input_ids=input_ids).logits - want).norm()
    assert distance < 0.8 * (plain(input_ids=input_ids).logits - want).norm()  # 0.6 here; 1 is what QLoRA starts with
    with model.disable_adapter():  # "the base" stays the model that was given, not its codes alone
        torch.testing.assert_close((model(input_ids=input_ids).logits - want).norm(), distance, rtol=1e-4, atol=0)
    assert len(loftq.layers) == 14 and 0.4 < loftq.mean_ratio < 0.95
    assert all(layer.ratio == layer.error / layer.error_plain for layer in loftq.layers)


def test_one_iteration_leaves_the_base_as_it_is() -> None:
    _, model, loftq = fitted(iterations=1)
    plain = small_llama()
    pack(plain)
    assert loftq.changed == [] and weights_sha256(model) == weights_sha256(plain)
    _, other, loftq = fitted(iterations=5)
    assert loftq.changed and weights_sha256(other) != weights_sha256(plain)


def test_dropout_does_not_hide_that_the_fused_decoder_computes_it() -> None:
    """An adapter that adds something from the start differs from itself under dropout; the check is made without."""
    _, model, _ = fitted(lora=LoraConfig(rank=8, alpha=64, dropout=0.5))
    objective = NextTokenLoss(model.train())
    assert objective.fused_decoder and objective.fused_head and model.training
    layer = model.get_base_model().model.layers[0].self_attn.q_proj
    assert layer.lora_dropout["default"].training


@pytest.mark.parametrize(
    "lora",
    [
        LoraConfig(rank=4, alpha=4),
        LoraConfig(rank=4, alpha=64, use_rslora=True),
        LoraConfig(rank=4, rank_pattern=["k_proj:2", r"layers\.1\.mlp\.up_proj:9"], alpha_pattern=["v_proj:1.0"]),
        LoraConfig(rank=4, target_modules=["q_proj", "down_proj"]),
        LoraConfig(rank=4, use_dora=True),
    ],
    ids=["plain", "rslora", "patterns", "targets", "dora"],
)
@torch.no_grad()
def test_layers_compute_codes_and_update(lora: LoraConfig) -> None:
    """Rank and scaling are those that PEFT gives the layer, so that what was fitted is what it computes."""
    dense, model, loftq = fitted(iterations=2, lora=lora)
    reports = {layer.name: layer for layer in loftq.layers}
    layers = {n: m for n, m in model.get_base_model().named_modules() if isinstance(m, LoraLinear)}
    assert layers.keys() == reports.keys()
    for name, layer in layers.items():
        weight, eye = dense.get_submodule(name).weight, torch.eye(layer.in_features)
        report = reports[name]
        assert (report.rank, report.scaling) == (layer.r["default"], layer.scaling["default"])
        left = (weight - layer(eye).T).norm().item()
        # products in float32 against the fit's: 1e-3 of an error is 1e-4 of a weight
        assert left == pytest.approx(report.error, rel=1e-3) and left < report.error_plain
    others = [m for n, m in model.get_base_model().named_modules() if isinstance(m, QuantLinear) and "base" not in n]
    assert len(others) + len(layers) == 14


def test_a_layer_that_its_codes_hold_exactly_starts_plain(caplog: pytest.LogCaptureFixture) -> None:
    quantizer, name = Quantizer(double_quant=False), "model.layers.1.mlp.up_proj"
    lora = LoraConfig(rank=8, alpha=16)

    def prepare(**settings: object) -> tuple[nn.Module, Loftq]:
        model = small_llama()
        layer = model.get_submodule(name)
        layer.weight.data = quantizer.quantize(layer.weight).dequantize(torch.float32)
        loftq = Loftq(LoftqConfig(iterations=3, **settings), lora)
        pack(model, loftq, quantizer)
        return model, loftq

    model, loftq = prepare()
    with caplog.at_level("WARNING", logger="trainer"):
        loftq.finish()
    assert name in caplog.text
    report = next(layer for layer in loftq.layers if layer.name == name)
    assert report.iteration == 0 and report.ratio == 1.0 and name not in loftq.changed
    layer = attach_lora(model, lora, seed=0, start=loftq.factors).get_base_model().get_submodule(name)
    lora_A, lora_B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert not lora_B.any() and lora_A.abs().max() > 0  # so that B learns
    with pytest.raises(UserError, match=rf"loftq.fallback=false.*{name}"):
        prepare(fallback=False)[1].finish()


def test_directions_that_a_residual_lacks_can_learn() -> None:
    """k_proj has 48 rows: of 64 directions 48 are fitted, the others have an A, as in plain LoRA, and add nothing."""
    _, model, loftq = fitted(iterations=1, lora=LoraConfig(rank=64, alpha=64))
    layer = model.get_base_model().model.layers[0].self_attn.k_proj
    lora_A, lora_B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    assert lora_A.shape == (64, 96) and lora_B[:, :48].norm(dim=0).min() > 0
    assert not lora_B[:, 48:].any() and lora_A[48:].norm(dim=1).min() > 0
    report = next(layer for layer in loftq.layers if layer.name.endswith("layers.0.self_attn.k_proj"))
    assert report.ratio < 1e-4  # the whole residual fits into the rank


def test_the_report_has_every_layer(tmp_path) -> None:
    _, _, loftq = fitted(iterations=2)
    loftq.write_report(tmp_path / "loftq.json")
    report = json.loads((tmp_path / "loftq.json").read_text())
    assert report["settings"]["iterations"] == 2 and report["mean_ratio"] == pytest.approx(loftq.mean_ratio)
    assert len(report["layers"]) == 14
    assert report["layers"][0].keys() >= {"name", "codebook", "error_plain", "error", "ratio", "iteration", "weighted"}


def test_memory_is_that_of_one_layer(tmp_path) -> None:
    """Each dense weight is freed when its codes are made: the peak above the loaded model does not grow with layers."""

    def peak_bytes(num_layers: int) -> int:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
            model = small_llama(num_layers, hidden_size=256)  # in here, or freeing its weights would not be seen
            with torch.profiler.record_function("packing"):
                pack(model, Loftq(LoftqConfig(iterations=2), LoraConfig(rank=4)))
        profiler.export_chrome_trace(str(tmp_path / "trace.json"))
        events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        began = next(event["ts"] for event in events if event["name"] == "packing")
        changes = [(event["ts"], event["args"]["Bytes"]) for event in events if event["name"] == "[memory]"]
        live = sum(num_bytes for at, num_bytes in changes if at < began)
        loaded = peak = live
        for _, num_bytes in sorted(change for change in changes if change[0] >= began):
            live += num_bytes
            peak = max(peak, live)
        assert live < loaded / 2  # four bits, factors and embeddings are left
        return peak - loaded

    largest = 512 * 256 * 4
    one = peak_bytes(1)
    # one layer in work: W, codes, residual, weighted, update in float32, the SVD's sides in float64
    assert largest < one < 12 * largest
    assert peak_bytes(6) <= one + largest  # the codes of five more alone are 2.8 times that


# ---- a base that was packed before


def packed_and_attached(lora: LoraConfig) -> nn.Module:
    model = small_llama()
    pack(model)
    return attach_lora(model, lora, seed=0)


@torch.no_grad()
@pytest.mark.parametrize("sharded", [False, True])
def test_a_packed_base_is_fitted_to_its_16_bit_weights(tmp_path, sharded: bool) -> None:
    dense, lora = small_llama(), LoraConfig(rank=8, alpha=64)
    dense.save_pretrained(tmp_path, max_shard_size="200KB" if sharded else "1GB")
    assert (tmp_path / "model.safetensors.index.json").is_file() == sharded
    model = packed_and_attached(lora)
    before = weights_sha256(model)
    input_ids = torch.arange(40).view(2, 20)
    want = dense(input_ids=input_ids).logits
    plain = (model(input_ids=input_ids).logits - want).norm()
    loftq = Loftq(LoftqConfig(iterations=1), lora)
    loftq.fit_packed_base(model, tmp_path)
    assert weights_sha256(model) == before  # the codes stay
    assert (model(input_ids=input_ids).logits - want).norm() < 0.9 * plain
    assert len(loftq.layers) == 14 and max(layer.ratio for layer in loftq.layers) < 0.95
    quantized = Quantizer().quantize(dense.model.layers[0].mlp.up_proj.weight)
    fit = fit_codes(dense.model.layers[0].mlp.up_proj.weight, quantized, rank=8, scaling=8.0)
    report = next(layer for layer in loftq.layers if layer.name == "model.layers.0.mlp.up_proj")
    assert report.error == pytest.approx(fit.error, rel=1e-6)


def test_a_packed_base_needs_its_16_bit_weights(tmp_path) -> None:
    lora = LoraConfig(rank=8)
    model, loftq = packed_and_attached(lora), Loftq(LoftqConfig(iterations=1), lora)
    with pytest.raises(UserError, match=r"holds no model.safetensors.*16-bit weights"):
        loftq.fit_packed_base(model, tmp_path)
    tensors = {f"{name}.weight": m.weight for name, m in small_llama().named_modules() if type(m) is nn.Linear}
    name = "model.layers.1.mlp.gate_proj.weight"
    for replaced, message in (
        ({name: torch.zeros(96 * 192 // 2, 1, dtype=torch.uint8)}, r"uint8 \(9216, 1\)"),
        ({name: torch.zeros(96, 192)}, r"float32 \(96, 192\).*\(192, 96\)"),
        ({}, f"has no {name}"),
    ):
        others = {key: tensor.contiguous() for key, tensor in tensors.items() if key != name}
        save_file({**others, **replaced}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=message):
            Loftq(LoftqConfig(iterations=1), lora).fit_packed_base(model, tmp_path)


# ---- settings


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"iterations": -1}, "loftq.iterations=-1; give 0 or more"),
        ({"iterations": 1, "calibration_rows": -2}, "loftq.calibration_rows=-2"),
        ({"calibration_rows": 8}, "loftq.calibration_rows=8 has no effect with loftq.iterations=0"),
        ({"fallback": False}, "loftq.fallback=false has no effect"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        LoftqConfig(**settings)
