import copy
import io
import math

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.optimization import get_wsd_schedule

from trainer.compose import load_config
from trainer.config.errors import UserError
from trainer.config.optim import DecayShape, OptimConfig, OptimizerName, Schedule
from trainer.master_weights import with_master_weights
from trainer.optim import (
    averaged_weights,
    build_optimizer,
    default_learning_rate,
    learning_rate,
    lora_learning_rate,
    parameter_groups,
    require_device,
    set_learning_rate,
    use_averaged_weights,
    use_training_weights,
)

RUNNABLE = [name for name in OptimizerName if not name.is_paged]
"""What a CPU runs."""


def config_of(name: OptimizerName, **settings) -> OptimConfig:
    if name is OptimizerName.adamw_schedule_free:
        settings.setdefault("schedule", Schedule.constant)
    return OptimConfig(name=name, **{"lr": 0.01, **settings})


class Layers(nn.Module):
    """One 2-D weight where optimizers look for hidden matrices: `layers.0.weight`."""

    def __init__(self, weight: torch.Tensor):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(*reversed(weight.shape), bias=False)])
        self.layers[0].weight.data.copy_(weight)

    @property
    def weight(self) -> nn.Parameter:
        return self.layers[0].weight


def walk(config: OptimConfig, *, steps: int = 3, shape=(64, 96)) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Weights before and after each of some steps, and the gradients; 6144 values, enough for 8-bit state."""
    generator = torch.Generator().manual_seed(0)
    model = Layers(torch.randn(shape, generator=generator))
    optimizer = build_optimizer(model, config)
    use_training_weights(optimizer)
    weights, grads = [model.weight.detach().double()], []
    for _ in range(steps):
        grad = torch.randn(shape, generator=generator)
        model.weight.grad = grad.clone()  # schedule-free computes in the gradient's memory
        set_learning_rate(optimizer, config.lr)
        optimizer.step()
        weights.append(model.weight.detach().double())
        grads.append(grad.double())
    return weights, grads


def adamw_formula(weight, grads, *, lr, beta1, beta2, eps, decay):
    """Algorithm 2 of arXiv:1711.05101."""
    m, v = torch.zeros_like(weight), torch.zeros_like(weight)
    for t, grad in enumerate(grads, start=1):
        m, v = beta1 * m + (1 - beta1) * grad, beta2 * v + (1 - beta2) * grad**2
        update = (m / (1 - beta1**t)) / ((v / (1 - beta2**t)).sqrt() + eps)
        weight = weight - lr * (update + decay * weight)
    return weight


def lion_formula(weight, grads, *, lr, beta1, beta2, decay):
    """Algorithm 2 of arXiv:2302.06675."""
    m = torch.zeros_like(weight)
    for grad in grads:
        update = torch.sign(beta1 * m + (1 - beta1) * grad)
        weight = weight - lr * (update + decay * weight)
        m = beta2 * m + (1 - beta2) * grad
    return weight


def schedule_free_formula(weight, grads, *, lr, beta1, beta2, eps, decay):
    """Algorithm 1 of arXiv:2405.15682; returns the training point y and the average x after the last step."""
    x = z = y = weight
    v = torch.zeros_like(weight)
    sum_of_squares = 0.0
    for t, grad in enumerate(grads, start=1):
        v = beta2 * v + (1 - beta2) * grad**2
        z = z - lr * (grad / ((v / (1 - beta2**t)).sqrt() + eps) + decay * y)
        sum_of_squares += lr**2
        c = lr**2 / sum_of_squares
        x = (1 - c) * x + c * z
        y = (1 - beta1) * z + beta1 * x
    return y, x


def muon_formula(weight, grads, *, lr, momentum, decay):
    """Jordan et al., Muon (2024): Nesterov momentum, five quintic Newton-Schulz steps; size of arXiv:2502.16982."""
    buffer = torch.zeros_like(weight)
    for grad in grads:
        buffer = momentum * buffer + (1 - momentum) * grad
        x = momentum * buffer + (1 - momentum) * grad
        x = x / x.norm()
        for _ in range(5):
            gram = x @ x.T
            x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
        weight = weight - lr * (0.2 * math.sqrt(max(weight.shape)) * x + decay * weight)
    return weight


ATOL = 2e-6
"""Float32 rounds a weight of size 4 to 2.4e-7 a step; three steps and their sums are well below ten times that."""


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_the_paper_s(decay):
    weights, grads = walk(config_of(OptimizerName.adamw, weight_decay=decay))
    expected = adamw_formula(weights[0], grads, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, decay=decay)
    torch.testing.assert_close(weights[-1], expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lion_is_the_paper_s(decay):
    """Default decays are those of the paper; a sign that float32 sees otherwise would be off by 2 lr = 0.02."""
    weights, grads = walk(config_of(OptimizerName.lion, weight_decay=decay))
    expected = lion_formula(weights[0], grads, lr=0.01, beta1=0.9, beta2=0.99, decay=decay)
    torch.testing.assert_close(weights[-1], expected, atol=ATOL, rtol=0)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_schedule_free_is_the_paper_s(decay):
    config = config_of(OptimizerName.adamw_schedule_free, weight_decay=decay)
    weights, grads = walk(config)
    y, _ = schedule_free_formula(weights[0], grads, lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, decay=decay)
    torch.testing.assert_close(weights[-1], y, atol=ATOL, rtol=0)


@pytest.mark.parametrize("shape", [(64, 96), (96, 64)])
def test_muon_is_the_paper_s(shape):
    """torch iterates in bfloat16 (8 bits): 5 steps of 3 products leave each entry of the update within a few 2^-8 of
    its size. The update's entries have size 0.2 lr sqrt(max / min) here, up to four times that at the largest."""
    weights, grads = walk(config_of(OptimizerName.muon, weight_decay=0.1), shape=shape)
    expected = muon_formula(weights[0], grads, lr=0.01, momentum=0.95, decay=0.1)
    error, update = (weights[-1] - expected).norm(), (expected - weights[0]).norm()
    assert error < 0.02 * update
    rms = (weights[1] - weights[0] * (1 - 0.01 * 0.1)).square().mean().sqrt()
    assert 0.5 * 0.2 * 0.01 < rms < 1.5 * 0.2 * 0.01  # singular values end in 0.5..1.5; AdamW's updates have 0.2 to 0.4


@pytest.mark.parametrize(
    ("name", "formula", "beta2"),
    [
        (OptimizerName.adamw_8bit, lambda *args, **kw: adamw_formula(*args, eps=1e-8, **kw), 0.999),
        (OptimizerName.lion_8bit, lion_formula, 0.99),
    ],
)
def test_8_bit_state_follows_the_formula(name, formula, beta2):
    """The first update is computed before anything is rounded. Later ones see state with the dynamic map's relative
    error, about 3 % (arXiv:2110.02861, section 2): AdamW's update moves by as much, Lion's by flips of signs near 0."""
    weights, grads = walk(config_of(name))
    one = formula(weights[0], grads[:1], lr=0.01, beta1=0.9, beta2=beta2, decay=0.0)
    torch.testing.assert_close(weights[1], one, atol=ATOL, rtol=0)
    three = formula(weights[0], grads, lr=0.01, beta1=0.9, beta2=beta2, decay=0.0)
    error = (weights[3] - three).norm() / (three - weights[0]).norm()
    assert 0 < error < 0.1


@pytest.mark.parametrize("name", RUNNABLE)
def test_state_survives_a_file_bit_for_bit(name):
    """Three steps, a file, three more: as six in one go. The whole of a small Llama, so that muon has its part."""
    config = config_of(name, weight_decay=0.1, layer_decay=0.9)
    generator = torch.Generator().manual_seed(0)
    whole = small_llama()
    tokens = torch.randint(0, 64, (6, 2, 16), generator=generator)

    def steps(model, optimizer, batches):
        use_training_weights(optimizer)
        for batch in batches:
            model(input_ids=batch, labels=batch).loss.backward()
            set_learning_rate(optimizer, 0.01)
            optimizer.step()
            optimizer.zero_grad()

    optimizer = build_optimizer(whole, config)
    steps(whole, optimizer, tokens[:3])
    file = io.BytesIO()
    with averaged_weights(optimizer):
        torch.save({"model": whole.state_dict(), "optimizer": optimizer.state_dict()}, file)
    steps(whole, optimizer, tokens[3:])

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    resumed = small_llama(seed=1)
    resumed.load_state_dict(saved["model"])
    optimizer = build_optimizer(resumed, config)
    optimizer.load_state_dict(saved["optimizer"])
    steps(resumed, optimizer, tokens[3:])
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    tensors = [leaf for leaf in tree_leaves(saved["optimizer"]) if torch.is_tensor(leaf)]
    assert any(tensor.dtype is torch.uint8 for tensor in tensors) == name.value.endswith("8bit")


def small_llama(*, seed: int = 0, **settings) -> LlamaForCausalLM:
    """Three layers, matrices of 4096 values and more."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 64, "intermediate_size": 80, "num_hidden_layers": 3, "vocab_size": 64}
    return LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=4, **sizes, **settings))


def groups_by_name(model: nn.Module, config: OptimConfig) -> dict[str, dict]:
    names = {param: name for name, param in model.named_parameters()}
    return {names[param]: group for group in parameter_groups(model, config) for param in group["params"]}


def test_muon_takes_float32_copies_of_16_bit_weights():
    """Full fine-tuning in bfloat16: from one start and by one gradient the copies walk as float32 weights do."""
    dense, rounded = small_llama(), small_llama().bfloat16()
    dense.load_state_dict(rounded.state_dict())
    config = config_of(OptimizerName.muon, weight_decay=0.1)
    optimizers = [build_optimizer(dense, config), with_master_weights(build_optimizer(rounded, config))]
    for step in range(3):
        for model, optimizer in zip((dense, rounded), optimizers, strict=True):
            generator = torch.Generator().manual_seed(step)
            for param in model.parameters():
                param.grad = torch.randn(param.shape, generator=generator).bfloat16().to(param.dtype)
            set_learning_rate(optimizer, 0.01)
            optimizer.step()
    assert all(torch.equal(a.bfloat16(), b) for a, b in zip(dense.parameters(), rounded.parameters(), strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_layer_decay_falls_from_the_top_and_vectors_do_not_decay(tied):
    groups = groups_by_name(
        small_llama(tie_word_embeddings=tied), config_of(OptimizerName.adamw, layer_decay=0.5, weight_decay=0.1)
    )
    expected = {"model.norm.weight": 1.0, "model.embed_tokens.weight": 0.125}
    expected |= {f"model.layers.{layer}.mlp.up_proj.weight": 0.5 ** (2 - layer) for layer in range(3)}
    expected |= {} if tied else {"lm_head.weight": 1.0}
    assert {name: groups[name]["lr_scale"] for name in expected} == expected
    assert {name for name, group in groups.items() if group["weight_decay"] == 0} == {
        name for name in groups if "norm" in name
    }


def test_muon_gets_hidden_matrices_only():
    groups = groups_by_name(small_llama(), config_of(OptimizerName.muon))
    assert {name for name, group in groups.items() if group["hidden"]} == {
        name for name in groups if name.endswith("_proj.weight")
    }


def lora_model(**settings) -> nn.Module:
    return get_peft_model(small_llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], **settings))


def test_lora_plus_groups_are_peft_s():
    """arXiv:2402.12354: B's rate is a multiple of A's. PEFT's groups are the peer."""
    model = lora_model()
    ours = groups_by_name(model, config_of(OptimizerName.adamw, lora_plus_ratio=16.0))
    peer = create_loraplus_optimizer(model, torch.optim.AdamW, lr=0.01, loraplus_lr_ratio=16.0)
    names = {param: name for name, param in model.named_parameters()}
    theirs = {names[param]: group["lr"] for group in peer.param_groups for param in group["params"]}
    assert {name: 0.01 * group["lr_scale"] for name, group in ours.items()} == pytest.approx(theirs)
    assert {group["lr_scale"] for group in ours.values()} == {1.0, 16.0}


def test_what_peft_adds_is_grouped_by_what_it_is():
    """Magnitudes are vectors; rows of the embedding belong below the lowest layer; a saved head is above all."""
    model = lora_model(use_dora=True, trainable_token_indices={"embed_tokens": [3, 5]}, modules_to_save=["lm_head"])
    groups = groups_by_name(
        model, config_of(OptimizerName.adamw, layer_decay=0.5, lora_plus_ratio=4.0, weight_decay=0.1)
    )
    found = {}
    for name, group in groups.items():
        for word in ("magnitude", "trainable_tokens", "lm_head", "layers.0.self_attn.q_proj.lora_B"):
            if word in name and word not in found:
                found[word] = (group["lr_scale"], group["weight_decay"], group["hidden"])
    assert found == {
        "magnitude": (0.25, 0.0, False),
        "trainable_tokens": (0.125, 0.1, False),
        "lm_head": (1.0, 0.1, False),
        "layers.0.self_attn.q_proj.lora_B": (0.25 * 4, 0.1, False),
    }


def test_each_group_gets_its_share_of_the_rate():
    """One step of AdamW moves each weight by lr times its share: the first update is the gradient's sign."""
    model = lora_model()
    optimizer = build_optimizer(model, config_of(OptimizerName.adamw, lora_plus_ratio=8.0, eps=1e-30))
    before = {name: param.detach().clone() for name, param in model.named_parameters() if param.requires_grad}
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    set_learning_rate(optimizer, 0.001)
    optimizer.step()
    for name, param in model.named_parameters():
        if param.requires_grad:
            expected = 0.008 if "lora_B" in name else 0.001
            # float32 rounds a weight of size 0.25 to 3e-8
            torch.testing.assert_close(before[name] - param, torch.full_like(param, expected), atol=1e-7, rtol=1e-4)


def test_the_average_is_the_paper_s_and_looking_changes_nothing():
    config = config_of(OptimizerName.adamw_schedule_free, weight_decay=0.1)
    model = Layers(torch.randn(64, 96, generator=torch.Generator().manual_seed(0)))
    weight = model.weight.detach().double()
    optimizer = build_optimizer(model, config)
    use_training_weights(optimizer)
    grads = [torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)) for seed in range(1, 8)]
    for grad in grads:
        model.weight.grad = grad.clone()
        set_learning_rate(optimizer, 0.01)
        optimizer.step()
    y, x = schedule_free_formula(
        weight, [g.double() for g in grads], lr=0.01, beta1=0.9, beta2=0.999, eps=1e-8, decay=0.1
    )
    trained, state = model.weight.detach().clone(), copy.deepcopy(optimizer.state_dict())
    with averaged_weights(optimizer):
        # seven steps, and x = y / 0.9 - z / 9 makes roundings of y and z a fifth larger
        torch.testing.assert_close(model.weight.detach().double(), x, atol=1e-5, rtol=0)
        assert (x - y).abs().max() > 1e-3  # or the test could not tell them apart
    assert torch.equal(model.weight, trained)
    after = optimizer.state_dict()
    assert tree_leaves(after["param_groups"]) == tree_leaves(state["param_groups"])
    assert all(torch.equal(after["state"][0][key], value) for key, value in state["state"][0].items())
    use_averaged_weights(optimizer)
    average = model.weight.detach().clone()
    use_averaged_weights(optimizer)  # at the end of a run that was finished already
    assert torch.equal(model.weight, average)
    use_training_weights(optimizer)
    assert torch.equal(model.weight, trained)


def test_others_have_one_set_of_weights():
    model = Layers(torch.ones(8, 8))
    optimizer = build_optimizer(model, config_of(OptimizerName.adamw))
    model.weight.grad = torch.ones(8, 8)
    optimizer.step()
    trained = model.weight.detach().clone()
    with averaged_weights(optimizer):
        assert torch.equal(model.weight, trained)
    assert set(optimizer.state[model.weight]) == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_paged_state_is_paged_again_after_a_checkpoint(monkeypatch, dtype):
    """bitsandbytes moves loaded state into the GPU's memory. The buffers stand in for CUDA's managed ones; bfloat16
    weights have their optimizer inside the one with float32 copies."""
    from bitsandbytes.optim import AdamW

    weight = nn.Parameter(torch.randn(64, 96).to(dtype))
    paging = AdamW([weight], optim_bits=8, is_paged=True)
    optimizer = with_master_weights(paging)
    weight.grad = torch.randn(64, 96).to(dtype)
    with pytest.warns(UserWarning, match="not supported on CPU"):
        optimizer.step()
    (state,) = paging.state.values()
    values = {key: state[key].clone() for key in ("state1", "state2")}

    def paged(param: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.zeros(param.shape, dtype=dtype)
        buffer.is_paged = True
        return buffer

    monkeypatch.setattr(paging, "get_state_buffer", paged)
    use_training_weights(optimizer)
    for key, value in values.items():
        assert state[key].is_paged and state[key].dtype is torch.uint8 and torch.equal(state[key], value)
    assert not hasattr(state["absmax1"], "is_paged")


@pytest.mark.parametrize(
    ("model", "settings", "words"),
    [
        (lora_model, {"name": OptimizerName.muon}, ["optim.name=muon", "hidden matrices", "adamw"]),
        (small_llama, {"lora_plus_ratio": 2.0}, ["optim.lora_plus_ratio=2.0", "LoRA factors"]),
        (lambda: Layers(torch.ones(8, 8)), {"layer_decay": 0.5}, ["optim.layer_decay=0.5", "one layer"]),
        (small_llama, {"name": OptimizerName.adamw_8bit_paged}, ["adamw_8bit_paged", "GPU", "cpu"]),
    ],
)
def test_what_has_no_effect_on_this_model_is_refused(model, settings, words):
    with pytest.raises(UserError) as caught:
        build_optimizer(model(), config_of(settings.pop("name", OptimizerName.adamw), **settings))
    assert all(word in str(caught.value) for word in words), caught.value


def test_paged_optimizers_need_a_gpu():
    for name in OptimizerName:
        require_device(OptimConfig(name=name, schedule=Schedule.constant), torch.device("cuda"))
        if name.is_paged:
            alternative = f"optim.name={name.value.removesuffix('_paged')}"
            with pytest.raises(UserError, match=alternative):
                require_device(OptimConfig(name=name), torch.device("cpu"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"name": OptimizerName.lion, "eps": 1e-6}, ["optim.eps", "no effect", "lion"]),
        ({"muon_momentum": 0.9}, ["optim.muon_momentum=0.9", "no effect", "optim.name=adamw"]),
        ({"decay_ratio": 0.1}, ["optim.decay_ratio=0.1", "no effect", "optim.schedule=wsd"]),
        ({"decay_shape": DecayShape.linear}, ["optim.decay_shape=linear", "no effect", "optim.schedule=wsd"]),
        ({"name": OptimizerName.adamw_schedule_free}, ["optim.schedule=cosine", "optim.schedule=constant"]),
        (
            {"name": OptimizerName.adamw_schedule_free, "schedule": Schedule.constant, "beta1": 0.0},
            ["optim.beta1=0", "0.9"],
        ),
        ({"schedule": Schedule.constant, "min_lr_ratio": 0.1}, ["optim.min_lr_ratio=0.1", "wsd"]),
        ({"schedule": Schedule.wsd, "decay_ratio": 0.0}, ["optim.decay_ratio=0.0", "(0, 1]"]),
        ({"schedule": Schedule.wsd, "decay_ratio": 0.6, "warmup_ratio": 0.5}, ["decay_ratio=0.6", "warmup_ratio=0.5"]),
        ({"layer_decay": 0.0}, ["optim.layer_decay=0.0", "(0, 1]"]),
        ({"layer_decay": 1.5}, ["optim.layer_decay=1.5", "(0, 1]"]),
        ({"lora_plus_ratio": 0.5}, ["optim.lora_plus_ratio=0.5", "at least 1"]),
        ({"beta2": 1.0}, ["optim.beta2=1.0", "[0, 1)"]),
        ({"name": OptimizerName.muon, "muon_momentum": 1.0}, ["optim.muon_momentum=1.0", "[0, 1)"]),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, words):
    with pytest.raises(UserError) as caught:
        OptimConfig(**settings)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["conf=qlora", "optim.name=muon"], ["optim.name=muon", "conf=full", "adamw"]),
        (["conf=full", "optim.lora_plus_ratio=4"], ["optim.lora_plus_ratio=4", "train.weights=all"]),
    ],
)
def test_optimizers_that_find_nothing_are_refused_before_a_model_is_read(overrides, words):
    with pytest.raises(UserError) as caught:
        load_config(*overrides)
    assert all(word in str(caught.value) for word in words), caught.value
    load_config("conf=full", "optim.name=muon")
    load_config("conf=qlora", "optim.lora_plus_ratio=4")


def test_lion_s_own_rate_is_a_tenth():
    assert default_learning_rate(OptimizerName.adamw, 576) == lora_learning_rate(576)
    for name in (OptimizerName.lion, OptimizerName.lion_8bit):
        assert default_learning_rate(name, 576) == pytest.approx(0.1 * lora_learning_rate(576))


@pytest.mark.parametrize("schedule", list(Schedule))
def test_warm_up_rises_to_the_peak_and_schedules_end_where_they_say(schedule):
    end = 0.0 if schedule is Schedule.constant else 0.2
    config = OptimConfig(lr=1.0, schedule=schedule, warmup_ratio=0.1, min_lr_ratio=end)
    rates = [learning_rate(step, 100, config) for step in range(101)]
    assert rates[:10] == sorted(rates[:10]) and 0 < rates[0] < rates[9] < 1
    assert rates[10] == 1.0
    assert rates[100] == pytest.approx(1.0 if schedule is Schedule.constant else 0.2)


def test_half_way_values():
    """Half-way between peak and end, cosine and linear meet at the mean."""
    for schedule in (Schedule.linear, Schedule.cosine):
        config = OptimConfig(lr=2.0, schedule=schedule, warmup_ratio=0.0, min_lr_ratio=0.0)
        assert learning_rate(50, 100, config) == pytest.approx(1.0)


@pytest.mark.parametrize(("shape", "peer"), [(DecayShape.sqrt, "1-sqrt"), (DecayShape.linear, "linear")])
def test_wsd_is_constant_and_then_falls_as_transformers_does(shape, peer):
    """Their warm-up begins at 0, ours at the first step of the rise; from the peak on they are one."""
    config = OptimConfig(lr=2.0, schedule=Schedule.wsd, warmup_ratio=0.1, decay_ratio=0.25, decay_shape=shape)
    theirs = get_wsd_schedule(
        torch.optim.SGD([nn.Parameter(torch.ones(()))], lr=2.0),
        num_warmup_steps=20,
        num_decay_steps=50,
        num_training_steps=200,
        decay_type=peer,
    ).lr_lambdas[0]
    ours = [learning_rate(step, 200, config) for step in range(200)]
    assert ours[20:] == pytest.approx([2.0 * theirs(step) for step in range(20, 200)])
    assert ours[20:151] == [2.0] * 131 and ours[151] < 2.0  # a decay begins with the share 1


def test_a_run_of_one_step_trains():
    for schedule in Schedule:
        assert learning_rate(0, 1, OptimConfig(lr=1.0, schedule=schedule, warmup_ratio=0.5)) > 0
