"""The LoRA family on our layers: against PEFT's own layers, over dense and packed bases, fused and called."""

import re

import pytest
import torch
from peft import PeftModel, get_peft_model, initialize_lora_eva_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from trainer import eva
from trainer.architecture import active_module
from trainer.config.errors import UserError
from trainer.config.lora import LoraConfig, LoraInit
from trainer.config.quant import Codebook, QuantConfig
from trainer.eva import initialize_eva, restore_eva
from trainer.kernels.lora_linear import lora_linear
from trainer.linear import quantize_linears
from trainer.lora import LoraLinear, attach_lora, peft_lora_config, register_layers
from trainer.lora_init import pack_residual, principal_factors, singular_factors
from trainer.model import prepare_model
from trainer.objective import NextTokenLoss
from trainer.quantizer import Quantizer


class Small(nn.Module):
    """One packed layer, with what PEFT asks of a model."""

    config = None

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(96, 40, bias=bias)
        self.norm = nn.RMSNorm(40)  # PEFT asks the first parameter for the device
        self.requires_grad_(False)

    def prepare_inputs_for_generation(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x))


def attached(dropout: float = 0.0, bias: bool = True) -> tuple[PeftModel, LoraLinear]:
    model = Small(bias)
    quantize_linears(model, Quantizer(), skip=set())
    peft_model = attach_lora(model, LoraConfig(rank=4, dropout=dropout), seed=0)
    layer = peft_model.base_model.model.proj
    nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    return peft_model, layer


@pytest.mark.parametrize("bias", [True, False])
def test_the_layer_is_its_frozen_weight_and_its_adapter(bias: bool) -> None:
    _, layer = attached(bias=bias)
    base, x = layer.get_base_layer(), torch.randn(2, 3, 96)
    y = lora_linear(x.view(6, 96), [base.frozen_weight], [layer.adapter], bias=base.bias)
    assert layer.fusable and torch.equal(layer(x), y.view(2, 3, 40))
    dense = base.quantized.dequantize(torch.float32)
    want = x @ (dense + layer.adapter.scaling * layer.adapter.lora_B @ layer.adapter.lora_A).T
    torch.testing.assert_close(layer(x), want if base.bias is None else want + base.bias, rtol=1e-4, atol=1e-5)


def test_a_disabled_adapter_is_none() -> None:
    model, layer = attached()
    x = torch.randn(5, 96)
    with model.disable_adapter():
        assert layer.fusable and layer.adapter is None
        assert torch.equal(layer(x), layer.get_base_layer()(x))
    assert layer.adapter is not None and not torch.equal(layer(x), layer.get_base_layer()(x))


def test_dropout_is_fusable_outside_training_alone() -> None:
    _, layer = attached(dropout=0.5)
    assert layer.train().fusable is False
    with pytest.raises(ValueError, match="dropout of adapter 'default' cannot be fused"):
        _ = layer.adapter
    assert layer.eval().fusable and layer.adapter.lora_A is layer.lora_A["default"].weight


def test_two_active_adapters_are_two_updates() -> None:
    model, layer = attached()
    model.add_adapter("other", model.peft_config["default"])
    nn.init.normal_(layer.lora_B["other"].weight, std=0.1)
    x = torch.randn(5, 96)
    base, one = layer.get_base_layer()(x), layer(x)
    model.base_model.set_adapter(["other"])
    assert layer.fusable and layer.adapter.lora_A is layer.lora_A["other"].weight
    other = layer(x)
    model.base_model.set_adapter(["default", "other"])
    assert not layer.fusable
    with pytest.raises(ValueError, match="2 active adapters"):
        _ = layer.adapter
    torch.testing.assert_close(layer(x), one + other - base, rtol=1e-4, atol=1e-5)  # order of sums


# ---- the family, against PEFT's own layers


class Two(nn.Module):
    """Two dense layers, the second without a bias, with what PEFT asks of a model."""

    config = None

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up_proj, self.down_proj = nn.Linear(96, 40), nn.Linear(40, 72, bias=False)
        self.requires_grad_(False)

    def prepare_inputs_for_generation(self) -> None: ...

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.up_proj(x))


def lora_layers(model: PeftModel) -> list[nn.Module]:
    return [model.base_model.model.up_proj, model.base_model.model.down_proj]


FAMILY = {
    "LoRA": {},
    "rsLoRA": {"use_rslora": True},
    "dropout": {"dropout": 0.3},
    "ranks of their own": {"rank_pattern": ["down_proj:2"], "alpha_pattern": ["up_.*:3"]},
    "DoRA": {"use_dora": True},
    "DoRA with dropout": {"use_dora": True, "dropout": 0.3},
    "PiSSA": {"init": LoraInit.pissa},
    "PiSSA with rsLoRA": {"init": LoraInit.pissa, "use_rslora": True},
    "PiSSA with dropout": {"init": LoraInit.pissa, "dropout": 0.3},
    "PiSSA with DoRA": {"init": LoraInit.pissa, "use_dora": True},
    "PiSSA with DoRA and dropout": {"init": LoraInit.pissa, "use_dora": True, "dropout": 0.3},
    "OLoRA": {"init": LoraInit.olora},
}


def ours(settings: dict) -> PeftModel:
    model, config = Two(), LoraConfig(rank=4, alpha=6.0, **settings)
    start = principal_factors(model, config) if config.init is not LoraInit.default else None
    return attach_lora(model, config, seed=0, start=start)


def theirs(settings: dict) -> PeftModel:
    """PEFT's own layers over the same weights."""
    config = LoraConfig(rank=4, alpha=6.0, **settings)
    init = True if config.init is LoraInit.default else config.init.value
    peft_config = peft_lora_config(config, ["up_proj", "down_proj"])
    peft_config.init_lora_weights = init
    return get_peft_model(Two(), peft_config)


@torch.no_grad()
def same_adapter(one: PeftModel, other: PeftModel) -> None:
    """Move the adapter of `one` away from its start, and copy it into `other`."""
    for mine, peer in zip(lora_layers(one), lora_layers(other), strict=True):
        for part in ("lora_A", "lora_B"):
            weight = getattr(mine, part)["default"].weight
            weight.add_(0.05 * torch.randn_like(weight))
            getattr(peer, part)["default"].weight.copy_(weight)
        if mine.lora_magnitude_vector:
            mine.lora_magnitude_vector["default"].weight.mul_(1.1)
            peer.lora_magnitude_vector["default"].weight.copy_(mine.lora_magnitude_vector["default"].weight)


def output_and_gradients(model: PeftModel) -> list[Tensor]:
    """y, dx and the gradient of each trained tensor, with PEFT's order of names."""
    torch.manual_seed(3)
    x = torch.randn(2, 5, 96).requires_grad_(True)
    params = [param for _, param in sorted(model.named_parameters()) if param.requires_grad]
    torch.manual_seed(4)  # the same dropout on both sides
    y = model.base_model.model(x)
    return [y, *torch.autograd.grad((y * y.detach().cos()).sum(), [x, *params])]


def nearly(one: Tensor, other: Tensor) -> None:
    """float32: sums in other orders, up to three products deep, and a residual that one side rounds."""
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5 * float(other.detach().abs().max()))


@pytest.mark.parametrize("name", FAMILY)
def test_each_variant_is_pefts(name: str) -> None:
    one, other = ours(FAMILY[name]).train(), theirs(FAMILY[name]).train()
    same_adapter(one, other)
    mine, peers = output_and_gradients(one), output_and_gradients(other)
    assert len(mine) == len(peers) >= 6
    for ours_, theirs_ in zip(mine, peers, strict=True):
        nearly(ours_, theirs_)


@pytest.mark.parametrize("init", [LoraInit.pissa, LoraInit.olora])
def test_parts_of_a_dense_weight_leave_what_pefts_base_is(init: LoraInit) -> None:
    one, other = ours({"init": init}), theirs({"init": init})
    for mine, peer in zip(lora_layers(one), lora_layers(other), strict=True):
        taken = mine.taken_out("default")
        residual = mine.get_base_layer().weight + taken.scaling * taken.lora_B @ taken.lora_A
        torch.testing.assert_close(residual, peer.get_base_layer().weight, rtol=0, atol=5e-6)  # PEFT's SVD is float32


@pytest.mark.parametrize("name", FAMILY)
def test_every_variant_starts_as_the_base(name: str) -> None:
    model, x = ours(FAMILY[name]).eval(), torch.randn(7, 96)
    with model.disable_adapter():
        base = model.base_model.model(x)
    torch.testing.assert_close(base, Two()(x), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(model.base_model.model(x), base, rtol=1e-4, atol=1e-5)  # order of sums


@pytest.mark.parametrize("shape", [(40, 96), (96, 40), (64, 64)])
def test_singular_factors_are_the_best_approximation(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    weight = torch.randn(shape)
    lora_A, lora_B = singular_factors(weight, 5, 1.5)
    U, S, Vt = torch.linalg.svd(weight.double(), full_matrices=False)
    best = (U[:, :5] * S[:5]) @ Vt[:5]
    torch.testing.assert_close(
        (1.5 * lora_B @ lora_A).double(), best, rtol=0, atol=1e-5
    )  # float32 factors, entries ~ 3
    sizes = lora_A.norm(dim=1), lora_B.norm(dim=0)
    torch.testing.assert_close(*sizes, rtol=1e-5, atol=0)  # each singular value is shared evenly


# ---- over a packed base


def packed(settings: dict) -> tuple[PeftModel, Two]:
    """The adapter over packed layers, and the same model with the codes' values in dense layers."""
    model, config = Two(), LoraConfig(rank=4, alpha=6.0, **settings)
    start = principal_factors(model, config) if config.init is not LoraInit.default else None
    pack = {} if start is None else {"pack": pack_residual(start, config)}
    quantize_linears(model, Quantizer(), skip=set(), **pack)
    dense = Two()
    with torch.no_grad():
        for name in ("up_proj", "down_proj"):
            getattr(dense, name).weight.copy_(getattr(model, name).quantized.dequantize(torch.float32))
    return attach_lora(model, config, seed=0, start=start), dense


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_dora_over_packed_weights_is_pefts_over_their_values(dropout: float) -> None:
    settings = {"use_dora": True, "dropout": dropout}
    one, dense = packed(settings)
    other = get_peft_model(dense, peft_lora_config(LoraConfig(rank=4, alpha=6.0, **settings), ["up_proj", "down_proj"]))
    for mine, peer in zip(lora_layers(one), lora_layers(other), strict=True):
        magnitudes = (layer.lora_magnitude_vector["default"].weight for layer in (mine, peer))
        torch.testing.assert_close(*magnitudes, rtol=1e-5, atol=0)  # sums of 40 or 96 squares
    same_adapter(one, other)
    for mine, peer in zip(output_and_gradients(one.train()), output_and_gradients(other.train()), strict=True):
        nearly(mine, peer)


@pytest.mark.parametrize("init", [LoraInit.pissa, LoraInit.olora])
def test_parts_of_the_weight_are_taken_out_before_packing(init: LoraInit) -> None:
    one, _ = packed({"init": init})
    config, whole, quantizer = LoraConfig(rank=4, alpha=6.0, init=init), Two(), Quantizer()
    for (name, (lora_A, lora_B)), layer in zip(principal_factors(whole, config).items(), lora_layers(one), strict=True):
        residual = whole.get_submodule(name).weight.double() - 1.5 * lora_B.double() @ lora_A.double()
        codes = quantizer.quantize(residual.float())
        assert torch.equal(layer.get_base_layer().packed, codes.packed)
        assert torch.equal(layer.lora_A["default"].weight, lora_A) and torch.equal(
            layer.lora_B["default"].weight, lora_B
        )


def test_pissa_loses_less_by_packing() -> None:
    """What the paper is for (arXiv:2404.02948, section 4): the residual has a smaller range than the weight.

    The largest singular values of a random matrix stand out little, so the gain is small and for sure.
    """
    one, _ = packed({"init": LoraInit.pissa})
    for layer, plain in zip(lora_layers(one), lora_layers(packed({})[0]), strict=True):
        weight = getattr(Two(), "up_proj" if layer.in_features == 96 else "down_proj").weight
        lora_A, lora_B = layer.factors("default")
        approximate = (
            layer.get_base_layer().quantized.dequantize(torch.float32) + layer.scaling["default"] * lora_B @ lora_A
        )
        error = (weight - approximate).norm()
        assert error < (weight - plain.get_base_layer().quantized.dequantize(torch.float32)).norm()


@pytest.mark.parametrize("dora", [False, True])
def test_a_packed_base_without_its_adapter_is_the_model_before_training(dora: bool) -> None:
    """Reference answers and losses are those of the model that was given, not of what PiSSA left of it."""
    model, _ = packed({"init": LoraInit.pissa, "use_dora": dora})
    x = torch.randn(5, 96)
    start = model.base_model.model(x)
    for layer in lora_layers(model):
        nn.init.normal_(layer.lora_B["default"].weight)
    assert not torch.allclose(model.base_model.model(x), start, rtol=0.1)
    with model.disable_adapter():
        torch.testing.assert_close(model.base_model.model(x), start, rtol=1e-5, atol=1e-6)


def test_dora_keeps_nothing_of_the_weights_size() -> None:
    torch.manual_seed(0)
    model = Small()
    model.proj = nn.Linear(512, 512, bias=False).requires_grad_(False)
    model.norm = nn.RMSNorm(512).requires_grad_(False)
    quantize_linears(model, Quantizer(), skip=set())
    peft_model = attach_lora(model, LoraConfig(rank=4, use_dora=True), seed=0)
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        peft_model.base_model.model(torch.randn(4, 512))
    assert max(kept.values()) <= model.proj.get_base_layer().packed.nbytes  # the codes themselves; dense is eight times
    state = sum(tensor.nbytes for tensor in model.state_dict().values())
    assert state < 0.4 * 512 * 512 * 4


# ---- what is refused


def test_an_svd_of_codes_is_refused() -> None:
    model = Two()
    quantize_linears(model, Quantizer(), skip=set())
    for init in (LoraInit.pissa, LoraInit.olora):
        with pytest.raises(UserError, match=f"lora.init={init.value} decomposes the 16-bit weights.*packed already"):
            attach_lora(model, LoraConfig(rank=4, init=init), seed=0)


@pytest.mark.parametrize(
    "setting", [{"init_lora_weights": "pissa"}, {"init_lora_weights": "loftq"}, {"lora_bias": True}]
)
def test_a_foreign_config_that_needs_a_dense_weight_is_refused(setting: dict) -> None:
    model = Two()
    quantize_linears(model, Quantizer(), skip=set())
    config = peft_lora_config(LoraConfig(rank=4), ["up_proj"])
    for key, value in setting.items():
        setattr(config, key, value)
    register_layers(config)
    with pytest.raises(ValueError, match=f"{next(iter(setting))}="):
        get_peft_model(model, config)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank_pattern": ["o_proj:3"]}, "lora.rank_pattern has 'o_proj', which fits no layer"),
        ({"alpha_pattern": ["up:3"]}, "lora.alpha_pattern has 'up', which fits no layer"),
        ({"target_modules": ["gate_proj"]}, "lora.target_modules has 'gate_proj'"),
        ({"target_modules": "layers.*"}, "lora.target_modules=layers.* matches nothing"),
        ({"target_modules": ".*"}, "lora.target_modules=.* matches"),
        ({"modules_to_save": ["norm"]}, "lora.modules_to_save has 'norm', which the model does not have"),
        ({"modules_to_save": ["up_proj"], "target_modules": ["down_proj"]}, "has 'up_proj', whose weights are packed"),
    ],
)
def test_names_that_fit_nothing(settings: dict, message: str) -> None:
    model = Two()
    quantize_linears(model, Quantizer(), skip=set())
    with pytest.raises(UserError, match=re.escape(message)):
        attach_lora(model, LoraConfig(rank=4, **settings), seed=0)


def test_a_rank_above_the_weights_is_refused_where_it_starts_from_parts_of_them() -> None:
    with pytest.raises(UserError, match="lora.rank=41 exceeds the 40 singular values of up_proj"):
        principal_factors(Two(), LoraConfig(rank=41, init=LoraInit.pissa))


def test_a_pattern_and_layer_numbers_choose_the_layers() -> None:
    def adapted(**settings: object) -> list[str]:
        model = attach_lora(llama(), LoraConfig(rank=2, **settings), seed=0).get_base_model()
        return [name.removeprefix("model.layers.") for name, m in model.named_modules() if isinstance(m, LoraLinear)]

    assert adapted(target_modules=r"model\.layers\.1\..*(q|v)_proj") == ["1.self_attn.q_proj", "1.self_attn.v_proj"]
    assert adapted(target_modules="down_proj", layers=[0]) == ["0.mlp.down_proj"]
    assert len(adapted()) == 14  # seven of each layer, and not the head


# ---- in a language model


def llama(**changes: object) -> nn.Module:
    torch.manual_seed(0)
    sizes = dict(vocab_size=250, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
    config = AutoConfig.for_model("llama", num_key_value_heads=2, max_position_embeddings=128, **{**sizes, **changes})
    return AutoModelForCausalLM.from_config(config).requires_grad_(False).eval()


def loss_and_gradients(objective: NextTokenLoss, *, by_transformers: bool) -> list[Tensor]:
    ids = torch.randint(0, 250, (3, 12), generator=torch.Generator().manual_seed(1))
    if by_transformers:
        logits = objective.model(input_ids=ids, use_cache=False).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
    else:
        loss = objective(ids, ids)
    params = [param for param in objective.parameters() if param.requires_grad]
    return [loss, *torch.autograd.grad(loss, params)]


@pytest.mark.parametrize("codebook", [Codebook.none, Codebook.nf4])
@pytest.mark.parametrize("settings", [{}, {"use_dora": True}, {"init": LoraInit.pissa}, {"target_modules": ["q_proj"]}])
def test_whole_layers_are_fused_over_dense_and_packed_bases(codebook: Codebook, settings: dict) -> None:
    """The fused decoder computes what the modules compute, and calls none of them."""
    model, config = llama(attention_bias=True), LoraConfig(rank=4, **settings)
    start = principal_factors(model, config) if config.init is LoraInit.pissa else None
    if codebook is not Codebook.none:
        prepare_model(
            model, QuantConfig(codebook=codebook), **({"pack": pack_residual(start, config)} if start else {})
        )
    peft_model = attach_lora(model, config, seed=0, start=start).train()
    for layer in (m for m in peft_model.modules() if isinstance(m, LoraLinear)):
        nn.init.normal_(layer.lora_B["default"].weight, std=0.1)
    objective = NextTokenLoss(peft_model)
    theirs_ = loss_and_gradients(objective, by_transformers=True)
    for layer in (m for m in peft_model.modules() if isinstance(m, LoraLinear)):
        layer.forward = None  # nobody may call it
    mine = loss_and_gradients(objective, by_transformers=False)
    for one, other in zip(mine, theirs_, strict=True):  # float32, sums of two layers in another order
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.detach().abs().max()))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("names", [["embed_tokens"], ["lm_head"], ["norm"]])
def test_modules_that_are_saved_are_trained(tied: bool, names: list[str]) -> None:
    """With transformers' gradients, through the fused head; a tied head stays the embedding."""
    model = attach_lora(llama(tie_word_embeddings=tied), LoraConfig(rank=2, modules_to_save=names), seed=0).train()
    objective = NextTokenLoss(model)
    assert objective.fused_decoder and objective.fused_head
    mine, theirs_ = (loss_and_gradients(objective, by_transformers=flag) for flag in (False, True))
    for one, other in zip(mine, theirs_, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4 * float(other.detach().abs().max()))
    saved = [name for name, param in model.named_parameters() if "modules_to_save" in name and param.requires_grad]
    assert saved and all(any(part in name for part in ("embed_tokens", "lm_head", "norm")) for name in saved)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if names != ["norm"]:
        same = active_module(embedding).weight.data_ptr() == active_module(head).weight.data_ptr()
        assert same == tied


def test_eva_is_pefts() -> None:
    """The same ranks and directions as PEFT over its own layers, from the same rows."""
    generator = torch.Generator().manual_seed(2)
    rows = [
        {"input_ids": ids, "labels": [-100] * 4 + ids[4:]}
        for ids in (torch.randint(0, 250, (int(n),), generator=generator).tolist() for n in range(10, 40))
    ]
    config = LoraConfig(rank=3, init=LoraInit.eva)
    model = attach_lora(llama(), config, seed=0)
    directions = initialize_eva(model, rows)
    restore_eva(model, directions)
    batch = eva._first_rows(rows, num_targets=eva.TARGETS_PER_COMPONENT * 6)
    batch["labels"] = torch.where(batch.pop("targets"), batch["input_ids"], -100)
    peer_targets = {name.rpartition(".")[2] for name in directions}
    peer = get_peft_model(llama(), peft_lora_config(config, sorted(peer_targets)))
    initialize_lora_eva_weights(peer, [batch], show_progress_bar=False)
    ranks, theirs = {}, {}
    for name, layer in model.named_modules():
        if isinstance(layer, LoraLinear):
            weight, other = layer.lora_A["default"].weight, peer.get_submodule(name).lora_A["default"].weight
            ranks[name], theirs[name] = len(weight), len(other)
            shared = min(len(weight), len(other))
            # up to their sign; PEFT adds the batch until its randomized vectors move less than 1 % in cosine
            torch.testing.assert_close(
                (weight[:shared] * other[:shared]).sum(1).abs(), torch.ones(shared), atol=1e-2, rtol=0
            )
            assert weight.requires_grad and not layer.lora_B["default"].weight.any()
            assert layer.scaling["default"] == layer.lora_alpha["default"] / len(weight)
    # Layers with the same input tie, and PEFT breaks ties anyhow, so what such a group has together is compared; a
    # share of PEFT's randomized decomposition can lie on the other side of the last one that gets a rank.
    groups = {name: re.sub(r"[qkv]_proj|(gate|up)_proj", "shared", name) for name in ranks}
    for group in set(groups.values()):
        members = [name for name in ranks if groups[name] == group]
        assert abs(sum(ranks[name] for name in members) - sum(theirs[name] for name in members)) <= 1
    assert sum(ranks.values()) == 14 * 3 and len(set(ranks.values())) > 1  # the sum stays, ranks moved
    assert model.peft_config["default"].init_lora_weights is True
    again = attach_lora(llama(), config, seed=0)
    restore_eva(again, directions)
    for (name, one), (_, other) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(one, other) or "lora_" not in name


def test_eva_needs_target_tokens() -> None:
    model = attach_lora(llama(), LoraConfig(rank=8, init=LoraInit.eva), seed=0)
    rows = [{"input_ids": [1, 2, 3], "labels": [-100, 2, 3]}] * 3
    with pytest.raises(UserError, match="fits 16 components"):
        initialize_eva(model, rows)
