"""Whatever the masks let through is valid under the schema; what they could not enforce is refused, in bounded time."""

import json
import random
import re
import sys
from collections.abc import Iterator

import jsonschema
import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from trainer.config.errors import UserError
from trainer.config.model import ModelConfig, ModelSource
from trainer.serve import grammar
from trainer.serve.grammar import CACHED_GRAMMARS, Grammar, GrammarCompiler
from trainer.serve.json_schema import MAX_SCHEMA_LEN, check_schema
from trainer.serve.sampler import SampleRow, sample
from trainer.serve.sampling_params import SamplingParams
from trainer.sources.resolve import resolve_model

EOS = 2
VOCAB_SIZE = 300
"""Wider than the tokenizer, as vocabularies with padding are."""

needs_xgrammar = pytest.mark.skipif(grammar.find_spec("xgrammar") is None, reason="xgrammar is not installed")

TREE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/tree"}}, "additionalProperties": False}
ENFORCED = [
    {},
    {"type": "boolean"},
    {"type": ["integer", "null"]},
    {"type": "integer", "minimum": -3, "exclusiveMaximum": 120},
    {"type": "integer", "multipleOf": 7},
    {"type": "number", "exclusiveMinimum": 0.5, "maximum": 7},
    {"type": "string", "minLength": 2, "maxLength": 5},
    {"type": "string", "pattern": r"^[a-c]+(?:-\d{2,3}|\.[^x]\w?)$"},
    {"type": "string", "pattern": "ab?"},
    {"type": "string", "format": "date"},
    {"type": "string", "format": "ipv4"},
    {"type": "string", "format": "uuid"},
    {"enum": ["one", 2, None, 'quo"te', "é\n"], "title": "Choice"},
    {"type": "string", "enum": ["a", "b"]},
    {"const": -1.5},
    {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    {"type": "array", "prefixItems": [{"type": "null"}, {"enum": ["x"]}], "items": False},
    {"type": "array", "prefixItems": [{"type": "null"}], "items": {"type": "boolean"}},
    {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]},
    {"allOf": [{"type": "boolean"}]},
    {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
    {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name"],
        "additionalProperties": False,
    },
    {"properties": {"a": {"type": "boolean"}, "b": {"items": {"type": "null"}}}},
    {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2},
    {"type": "object", "patternProperties": {"^[ab]{1,2}$": {"type": "null"}}, "additionalProperties": False},
]

SHAPES = {
    "date": r"\d{4}-[01]\d-[0-3]\d",
    "ipv4": r"[0-2]?\d?\d(\.[0-2]?\d?\d){3}",
    "uuid": "[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
}


@pytest.fixture(scope="module")
def tiny() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(resolve_model(ModelConfig(source=ModelSource.tiny)))


@pytest.fixture(scope="module")
def compiler(tiny: PreTrainedTokenizerBase) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tiny, VOCAB_SIZE)
    yield compiler
    compiler.close()


def allowed(state: Grammar) -> list[int]:
    bits = np.unpackbits(state.bitmask().numpy().view(np.uint8), bitorder="little")[:VOCAB_SIZE]
    return np.flatnonzero(bits).tolist()


def random_answer(state: Grammar, seed: int, max_tokens: int) -> list[int]:
    """Random logits under the mask; every token that is drawn must be accepted. Without the end token."""
    generator, output = torch.Generator().manual_seed(seed), []
    for _ in range(max_tokens):
        logits: Tensor = torch.randn(1, VOCAB_SIZE, generator=generator) * 2
        logits[0, EOS] += 2
        mask = state.bitmask()
        row = SampleRow(SamplingParams(), seed, 0, [], output, (EOS,), mask)
        token_id = sample(logits, [row])[0].token_id
        assert state.accept(token_id)
        if state.terminated:
            assert token_id == EOS
            return output
        output.append(token_id)
    return output


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False).input_ids


def accepts(state: Grammar, tokens: list[int]) -> bool:
    return all(state.accept(token_id) for token_id in tokens)


@needs_xgrammar
@pytest.mark.parametrize("schema", ENFORCED, ids=json.dumps)
def test_random_answers_are_valid(schema: dict, tiny: PreTrainedTokenizerBase, compiler: GrammarCompiler) -> None:
    compiled = compiler.compile(json.dumps(schema))
    validator = jsonschema.Draft202012Validator(schema)
    num_whole = 0
    for seed in range(12):
        state = Grammar(compiled)
        output = random_answer(state, seed, max_tokens=400)
        if state.terminated:
            answer = json.loads(tiny.decode(output))
            validator.validate(answer)
            assert re.fullmatch(SHAPES.get(schema.get("format"), ".*"), str(answer), re.DOTALL)
            num_whole += 1
    assert num_whole >= 3  # of 12 fixed seeds; else the schema was hardly tried


@needs_xgrammar
def test_a_cut_answer_is_the_beginning_of_a_valid_one(tiny: PreTrainedTokenizerBase, compiler: GrammarCompiler) -> None:
    """From wherever an answer is cut, closing it as fast as the masks allow gives valid JSON."""
    schema = {"type": "array", "items": {"type": "object", "properties": {"k": {"type": "string"}}}}
    compiled = compiler.compile(json.dumps(schema))
    closing = [EOS, *encode(tiny, '"}]')]
    for seed in range(8):
        state = Grammar(compiled)
        output = random_answer(state, seed, max_tokens=3 + seed)
        for _ in range(60):
            if state.terminated:
                break
            may = allowed(state)
            token_id = next((i for i in closing if i in may), may[0])
            assert state.accept(token_id)
            output.append(token_id)
        assert state.terminated
        jsonschema.validate(json.loads(tiny.decode(output, skip_special_tokens=True)), schema)


@needs_xgrammar
def test_the_mask_is_the_accepted_tokens(tiny: PreTrainedTokenizerBase, compiler: GrammarCompiler) -> None:
    """Each token alone: those in the mask are accepted, others not, and a refused one changes nothing."""
    state = Grammar(compiler.compile('{"type": "array", "items": {"type": "boolean"}}'))
    assert state.bitmask().shape == (10,) and state.bitmask().dtype == torch.int32  # ceil(300 / 32)
    for step in encode(tiny, "[true,"):
        may = allowed(state)
        assert step in may and all(token_id < 260 for token_id in may)
        for token_id in range(260):
            fork = state.fork()
            assert fork.accept(token_id) == (token_id in may)
            assert token_id in may or allowed(fork) == may
        assert state.accept(step)


@needs_xgrammar
def test_the_end_comes_when_the_answer_is_complete(tiny: PreTrainedTokenizerBase, compiler: GrammarCompiler) -> None:
    state = Grammar(compiler.compile('{"enum": ["ab"]}'))
    assert EOS not in allowed(state) and accepts(state, encode(tiny, '"ab"'))
    assert allowed(state) == [EOS] and not state.terminated
    assert state.accept(EOS) and state.terminated and not state.accept(EOS)


@needs_xgrammar
def test_other_end_tokens(tiny: PreTrainedTokenizerBase) -> None:
    compiler = GrammarCompiler(tiny, VOCAB_SIZE, (0, EOS))
    state = Grammar(compiler.compile('{"const": 1}'))
    compiler.close()
    assert accepts(state, encode(tiny, "1")) and allowed(state) == [0, EOS]


@needs_xgrammar
def test_forks_and_rollbacks(tiny: PreTrainedTokenizerBase, compiler: GrammarCompiler) -> None:
    state = Grammar(compiler.compile('{"type": "array", "items": {"type": "integer"}}'))
    assert accepts(state, encode(tiny, "[1"))
    before = allowed(state)
    fork = state.fork()
    assert accepts(fork, encode(tiny, "2]")) and allowed(fork) == [EOS]
    assert allowed(state) == before
    assert fork.accept(EOS) and fork.terminated
    fork.rollback(3)
    assert not fork.terminated and allowed(fork) == before
    fork.rollback(0)
    assert allowed(fork) == before


@needs_xgrammar
def test_an_answer_cannot_be_filled_with_spaces(tiny: PreTrainedTokenizerBase, compiler: GrammarCompiler) -> None:
    state = Grammar(compiler.compile('{"type": "array", "items": {"type": "null"}, "minItems": 1}'))
    (space,) = encode(tiny, " ")
    assert accepts(state, [*encode(tiny, "["), *[space] * grammar.MAX_WHITESPACE])
    assert space not in allowed(state) and allowed(state)


@needs_xgrammar
def test_the_cache_is_bounded_and_keeps_the_latest(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    first = compiler.compile('{"const": "first"}')
    for i in range(CACHED_GRAMMARS + 5):
        compiler.compile(json.dumps({"const": i}))
        assert compiler.compile('{"const":"first"}') is first  # another spelling, and used each time
    assert len(compiler._cache) == CACHED_GRAMMARS


# ---- what is refused

UNENFORCED = [
    ({"not": {}}, "# has not, which cannot be enforced"),
    ({"if": {}, "then": {}}, "has if, then"),
    ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    ({"type": "array", "contains": {}}, "contains"),
    ({"type": "object", "minProperties": 1}, "minProperties"),
    ({"type": "object", "dependentRequired": {}}, "dependentRequired"),
    ({"type": "object", "propertyNames": {}}, "propertyNames"),
    ({"type": "object", "unevaluatedProperties": False}, "unevaluatedProperties"),
    ({"type": "string", "minlength": 3}, "minlength"),
    ({"minimum": 3}, "minimum, which cannot be enforced here; leave it out or add a type"),
    ({"type": "string", "minimum": 3}, "minimum"),
    ({"type": "number", "multipleOf": 2}, "multipleOf"),
    ({"type": "integer", "multipleOf": 0.5}, "multipleOf"),
    ({"type": "integer", "multipleOf": 2, "minimum": 1}, "multipleOf"),
    ({"type": "object", "required": ["a"]}, r"requires \['a'\], which is not in its properties"),
    ({"type": "object", "required": [[]]}, "no list of names"),
    ({"type": "object", "properties": {"a": {}}, "patternProperties": {"b": {}}}, "patternProperties"),
    ({"type": "string", "pattern": "a", "minLength": 3}, "combines pattern, format and length"),
    ({"type": "string", "format": "hostname"}, "has format 'hostname'; use one of date"),
    ({"type": "string", "format": []}, "has format"),
    ({"oneOf": [{}]}, "oneOf, of which only one may hold; use anyOf"),
    ({"allOf": [{}, {}]}, "merge them"),
    ({"anyOf": [{"type": "null"}], "type": "integer"}, "has type beside anyOf"),
    ({"anyOf": []}, "no list of schemas"),
    ({"$ref": "#/$defs/a", "minimum": 3, "$defs": {"a": {}}}, r"has minimum beside \$ref"),
    ({"$ref": "http://x/y"}, "must begin with #/"),
    ({"$ref": "#a"}, "must begin with #/"),
    ({"$ref": 3}, "must begin with #/"),
    ({"enum": [1], "const": 1}, "combines const, enum"),
    ({"enum": [1, "a"], "type": "integer"}, "a value in enum"),
    ({"const": True, "type": "integer"}, "a value in const"),
    ({"enum": 3}, "no list of values"),
    ({"type": "strin"}, "has type 'strin'; use object"),
    ({"type": ["string", []]}, "has type"),
    ({"properties": {"a": {"items": 3}}}, "#/properties/a/items is no schema"),
    ({"properties": 3}, "properties that are no object"),
    ({"$defs": {"a": {"oneOf": []}}}, r"#/\$defs/a has oneOf"),
    ({"type": "array", "prefixItems": {}}, "prefixItems"),
    ({"type": "array", "items": [{}]}, "#/items is no schema"),
]
PATTERNS = [
    '"',
    '^["]$',
    "\\\\",
    "\\n",
    "[\\x22]",
    "\\u0022",
    "\t",
    "(?=a)b",
    "(?!a)b",
    "(?<!a)b",
    "a$b",
    "a^",
    "^a$|^b$",
]


@pytest.mark.parametrize(
    ("schema", "says"),
    [*UNENFORCED, *(({"type": "string", "pattern": pattern}, "rewrite it") for pattern in PATTERNS)],
    ids=repr,
)
def test_what_would_not_be_enforced_is_refused(schema: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_schema(json.dumps(schema))


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("{'a': 1}", "is no JSON"),
        ('{"const": NaN}', "NaN is no JSON number"),
        ("[]", "is no object"),
        ("true", "is no object"),
        ('"{}"', "is no object"),
        (json.dumps({"enum": ["x" * MAX_SCHEMA_LEN]}), f"give at most {MAX_SCHEMA_LEN}"),
        ('{"items":' * 40 + "{}" + "}" * 40, "more than 32 levels"),
        ("[" * 30_000 + "]" * 30_000, "more than 32 levels"),
    ],
    ids=lambda value: value[:20],
)
def test_texts_that_are_no_schema(schema: str, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_schema(schema)


@needs_xgrammar
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 5, "maximum": 1},
        {"type": "string", "minLength": -1},
        {"type": "string", "maxLength": "x"},
        {"type": "array", "minItems": 1.5},
        {"type": "integer", "minimum": 10**30},
        {"$ref": "#"},
        {"$ref": "#/nope"},
        {"type": "string", "pattern": "(["},
        {"type": "string", "pattern": "^*$"},
        {"const": "\ud800"},
        {"enum": []},
    ],
    ids=json.dumps,
)
def test_what_xgrammar_refuses_is_the_users_mistake(schema: dict, compiler: GrammarCompiler) -> None:
    for _ in range(2):  # the second time from the cache
        with pytest.raises(UserError, match="json_schema"):
            compiler.compile(json.dumps(schema))


@needs_xgrammar
def test_a_hostile_schema_is_given_up(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process is killed, others go on; 10,000 counted letters take xgrammar seconds."""
    monkeypatch.setattr(grammar, "COMPILE_LIMIT_S", 0.5)
    with pytest.raises(UserError, match=r"more than 0\.5 s or too much memory; simplify it"):
        compiler.compile(json.dumps({"type": "string", "pattern": "^a{20000}$"}))
    monkeypatch.undo()
    assert compiler._worker is None
    assert not Grammar(compiler.compile('{"const": "still here"}')).terminated


@needs_xgrammar
def test_what_is_large_but_harmless_compiles(compiler: GrammarCompiler) -> None:
    names = [f"value{i}" for i in range(2000)]
    compiler.compile(json.dumps({"enum": names}))
    compiler.compile(json.dumps({"type": "object", "properties": {name: {"type": "integer"} for name in names[:60]}}))


@needs_xgrammar
def test_a_grammar_of_too_many_bytes_is_refused(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar, "MAX_GRAMMAR_BYTES", 1000)
    with pytest.raises(UserError, match=r"takes \d+ bytes compiled, above 1000; make it smaller"):
        compiler.compile('{"type": "object", "title": "large"}')


@needs_xgrammar
def test_no_control_character_but_a_newline_is_written(
    tiny: PreTrainedTokenizerBase, compiler: GrammarCompiler
) -> None:
    """xgrammar's strings of a given length take tabs and zero bytes as they are: no JSON parser reads them."""
    for schema in ({}, {"type": "string", "maxLength": 5}, {"type": "array", "items": {}}):
        state = Grammar(compiler.compile(json.dumps(schema)))
        for text in ('["a', '"a', "["):
            fork = state.fork()
            if accepts(fork, encode(tiny, text)):
                written = [tiny.decode([token_id]) for token_id in allowed(fork) if token_id != EOS]
                assert written and not [c for c in written if c < " " and c != "\n"]


@needs_xgrammar
def test_a_process_that_does_not_start_is_no_users_mistake(
    tiny: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(RuntimeError, match="did not start"):
        GrammarCompiler(tiny, VOCAB_SIZE).compile("{}")


def test_without_xgrammar_the_way_to_get_it_is_named(
    tiny: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar, "find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"pip install 'lowbit\[serve\]'"):
        GrammarCompiler(tiny, VOCAB_SIZE).compile("{}")


@needs_xgrammar
def test_a_tokenizer_without_an_end_is_refused(compiler: GrammarCompiler) -> None:
    tokenizer = AutoTokenizer.from_pretrained(resolve_model(ModelConfig(source=ModelSource.tiny)))
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-text token"):
        GrammarCompiler(tokenizer, VOCAB_SIZE).compile("{}")


def test_no_text_at_all_brings_anything_but_a_user_error() -> None:
    """Schemas broken at random places: refused or passed on, never another exception."""
    choose = random.Random(0)
    texts = [json.dumps(schema) for schema in [*ENFORCED, *(schema for schema, _ in UNENFORCED)]]
    values = ["3", "[]", "{}", '"x"', "null", "true", "[[]]", '{"a": []}', "-1", "1e400"]
    for _ in range(3000):
        text = choose.choice(texts)
        cuts = [i for i, c in enumerate(text) if c in ":,[{"]
        start = choose.choice(cuts or [0]) + 1
        end = text.find(choose.choice(",}]"), start)
        text = text[:start] + choose.choice(values) + text[end if end > 0 else start :]
        try:
            check_schema(text)
        except UserError:
            pass
