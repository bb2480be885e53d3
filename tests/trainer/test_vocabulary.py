"""Added tokens: the same ids and rows on every machine, and no other tokenizer is taken for the trained one."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from trainer.config.errors import UserError
from trainer.config.model import ModelConfig, ModelSource
from trainer.model import load_model, load_stop_ids, load_tokenizer
from trainer.sources.tiny import tiny_model
from trainer.vocabulary import add_tokens, check_tokenizer, tokenizer_sha256

TOKENS = ["<tool>", "</tool>"]


@pytest.fixture
def tokenizer():
    return AutoTokenizer.from_pretrained(tiny_model())


def random_model(num_rows: int, *, tied: bool = True):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}
    return AutoModelForCausalLM.from_config(
        LlamaConfig(vocab_size=num_rows, **sizes, num_key_value_heads=2, tie_word_embeddings=tied), dtype=torch.float32
    )


@pytest.mark.parametrize("tied", [True, False])
def test_new_rows_are_the_mean_and_old_ones_stay(tokenizer, tied):
    model = random_model(260, tied=tied)
    layers = model.get_input_embeddings(), model.get_output_embeddings()
    before = [layer.weight.detach().clone() for layer in layers]
    random_state = torch.get_rng_state()
    assert add_tokens(model, tokenizer, TOKENS) == [260, 261]
    assert torch.equal(torch.get_rng_state(), random_state)
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert (head.weight is embedding.weight) is tied
    assert model.config.vocab_size == len(tokenizer) == 262 and head.out_features == 262
    for layer, old in zip((embedding, head), before, strict=True):
        assert torch.equal(layer.weight[:260], old)
        mean = old.double().mean(0).float()
        assert torch.equal(layer.weight[260], mean) and torch.equal(layer.weight[261], mean)


def test_rows_in_stock_are_used(tokenizer):
    """Qwen's vocabularies are padded: `resize_token_embeddings(len(tokenizer))` would cut the padding off."""
    model = random_model(320)
    before = model.get_input_embeddings().weight.detach().clone()
    assert add_tokens(model, tokenizer, TOKENS) == [260, 261]
    assert torch.equal(model.get_input_embeddings().weight, before) and model.config.vocab_size == 320


def test_an_added_token_is_one_id_inside_text_and_visible_in_answers(tokenizer):
    add_tokens(random_model(260), tokenizer, TOKENS)
    ids = tokenizer("a<tool>b</tool>")["input_ids"]
    assert ids[1] == 260 and ids[3] == 261 and len(ids) == 4
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>b</tool>"


def test_a_token_that_is_there_is_refused():
    with pytest.raises(UserError, match=r"model.add_tokens has \['<\|im_end\|>'\], which the vocabulary holds already"):
        load_model(ModelConfig(source=ModelSource.tiny, add_tokens=["<a>", "<|im_end|>"]))


@pytest.mark.parametrize("tokens", [["<a>", "<a>"], ["<a>", ""], [" "]])
def test_add_tokens_are_checked_at_once(tokens):
    with pytest.raises(UserError, match="model.add_tokens=.*give each token once"):
        ModelConfig(source=ModelSource.tiny, add_tokens=tokens)


def test_loading_twice_gives_the_same_bits():
    first, second = (load_model(ModelConfig(source=ModelSource.tiny, add_tokens=TOKENS))[0] for _ in range(2))
    assert torch.equal(first.get_input_embeddings().weight, second.get_input_embeddings().weight)
    assert not any(parameter.requires_grad for parameter in first.parameters())


def test_the_tokenizer_alone_is_that_of_the_loaded_model():
    config = ModelConfig(source=ModelSource.tiny, add_tokens=TOKENS)
    alone = load_tokenizer(config)
    assert tokenizer_sha256(alone) == tokenizer_sha256(load_model(config)[1])
    assert alone.convert_tokens_to_ids(TOKENS) == [260, 261]
    with pytest.raises(UserError, match=r"model.add_tokens has \['<\|im_end\|>'\], which the vocabulary holds already"):
        load_tokenizer(ModelConfig(source=ModelSource.tiny, add_tokens=["<|im_end|>"]))


def test_a_folder_without_tokenizer_is_answered(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(UserError, match="holds no tokenizer that can be read"):
        load_tokenizer(ModelConfig(ModelSource.folder, str(tmp_path)))


@pytest.mark.parametrize("listed, expected", [(None, {2}), (0, {0}), ([0, 2], {0, 2})])
def test_stops_are_those_of_the_generation_config_or_else_of_the_config(tmp_path, listed, expected):
    folder = shutil.copytree(tiny_model(), tmp_path / "model")
    (folder / "generation_config.json").unlink(missing_ok=True)
    if listed is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": listed}))
    assert load_stop_ids(ModelConfig(ModelSource.folder, str(folder))) == expected


def test_a_tokenizer_is_known_by_what_it_does(tokenizer, tmp_path):
    add_tokens(random_model(260), tokenizer, TOKENS)
    trained = {
        "tokenizer_sha256": tokenizer_sha256(tokenizer),
        "num_tokens": 262,
        "added_tokens": {"<tool>": 260, "</tool>": 261},
    }
    tokenizer.save_pretrained(tmp_path)
    check_tokenizer(AutoTokenizer.from_pretrained(tmp_path), trained, "adapter")
    check_tokenizer(tokenizer, {}, "adapter")  # of another's making, which says nothing

    plain = AutoTokenizer.from_pretrained(tiny_model())
    with pytest.raises(UserError, match=r"adapter was trained with another tokenizer: it lacks the added tokens"):
        check_tokenizer(plain, trained, "adapter")

    swapped = AutoTokenizer.from_pretrained(tiny_model())
    add_tokens(random_model(260), swapped, TOKENS[::-1])
    with pytest.raises(UserError, match="has them under other ids"):
        check_tokenizer(swapped, trained, "adapter")

    larger = AutoTokenizer.from_pretrained(tmp_path)
    larger.add_tokens(["<more>"])
    with pytest.raises(UserError, match="it has 263 tokens instead of 262"):
        check_tokenizer(larger, trained, "adapter")

    lower = AutoTokenizer.from_pretrained(tmp_path)
    from tokenizers import normalizers

    lower.backend_tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(UserError, match="or it splits text differently"):
        check_tokenizer(lower, trained, "adapter")
