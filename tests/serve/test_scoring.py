"""Scores over HTTP: what evaluation harnesses send and how they read the answer, replayed with their own arithmetic."""

import httpx
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from tests.serve.fake_engine import FakeEngine, serving
from trainer.config.errors import UserError
from trainer.serve.http.logprobs import CompletionLogprobs, chat_logprobs
from trainer.serve.http.prompts import encode_text
from trainer.serve.http.scoring import encode_pair, score
from trainer.serve.http.vocabulary import Vocabulary
from trainer.serve.outputs import TokenLogprob
from trainer.sources.tiny import tiny_model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model())


@pytest.fixture(scope="module")
def engine(tokenizer):
    return FakeEngine(tokenizer, answer="ok 👍")


@pytest.fixture(scope="module")
def client(engine):
    with serving(engine) as url, httpx.Client(base_url=url) as client:
        yield client


def merged_tokenizer() -> PreTrainedTokenizerBase:
    """Byte-level BPE with merges that make borders matter: a word's tokens depend on the space before it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ġ", "a"), ("Ġa", "b"), ("a", "b"), ("Ġ", "Ġ")]
    tokens = [*alphabet, *("".join(pair) for pair in merges), "<s>", "</s>"]
    vocab = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    ends = [("<s>", vocab["<s>"]), ("</s>", vocab["</s>"])]
    backend.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=ends)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def sentencepiece_tokenizer() -> PreTrainedTokenizerBase:
    """As Llama 2's: underlines for spaces, bytes for what is missing, and one text that two ids stand for."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "H", "i", "A", "▁H"]
    backend = Tokenizer(
        models.BPE({t: i for i, t in enumerate(tokens)}, [("▁", "H")], unk_token="<unk>", byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


# ---- how lm-evaluation-harness reads a completion


def harness_scores(client: httpx.Client, pairs: list[tuple[list[int], list[int]]], max_tokens: int) -> list:
    """A batch of (context, continuation) as `local-completions` sends and sums it; one generated token is dropped."""
    answer = client.post(
        "/v1/completions",
        json={
            **{"model": "fake", "prompt": [context + continuation for context, continuation in pairs], "seed": 1234},
            **{"temperature": 0, "max_tokens": max_tokens, "logprobs": 1, "echo": True},
        },
    ).json()
    results = []
    for (context, continuation), choice in zip(pairs, sorted(answer["choices"], key=lambda c: c["index"]), strict=True):
        logprobs, end = choice["logprobs"], len(context) + len(continuation)
        assert len(logprobs["token_logprobs"]) == end + max_tokens
        own = logprobs["token_logprobs"][len(context) : end]
        best = [max(top.values()) for top in logprobs["top_logprobs"][len(context) : end]]
        results.append((sum(own), all(a == b for a, b in zip(own, best, strict=True))))
    return results


def truth(engine: FakeEngine, context: list[int], continuation: list[int]) -> tuple[float, bool]:
    ids, total, greedy = [*context, *continuation], 0.0, True
    for at in range(len(context), len(ids)):
        values = engine.logprobs(ids[:at], None)
        total += float(values[ids[at]])
        greedy &= int(values.argmax()) == ids[at]
    return total, greedy


def greedy_ids(engine: FakeEngine, context: list[int], length: int) -> list[int]:
    ids = list(context)
    for _ in range(length):
        ids.append(int(engine.logprobs(ids, None).argmax()))
    return ids[len(context) :]


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_the_harness_reads_the_models_own_scores(client, engine, max_tokens):
    contexts = [[5, 6, 7], [9], [40, 41], [8, 8, 8, 8]]
    pairs = [(context, greedy_ids(engine, context, 3)) for context in contexts]
    pairs += [([5, 6, 7], [10, 11]), ([5, 6, 7], [259])]
    scores = harness_scores(client, pairs, max_tokens)
    assert scores == [truth(engine, *pair) for pair in pairs]  # floats travel as JSON without loss
    assert [greedy for _, greedy in scores] == [True] * 4 + [False] * 2


def test_loglikelihood_says_the_same_and_reads_contexts_from_the_cache(client, engine):
    contexts = [[5, 6, 7], [9, 10]]
    items = [{"context": c, "continuations": [greedy_ids(engine, c, 2), [12], [13, 14, 15]]} for c in contexts]
    answer = client.post("/v1/loglikelihood", json={"requests": items}).json()
    for item, result in zip(items, answer["results"], strict=True):
        scores = harness_scores(client, [(item["context"], own) for own in item["continuations"]], 1)
        assert [(s["logprob"], s["is_greedy"]) for s in result["continuations"]] == scores
        assert [s["num_tokens"] for s in result["continuations"]] == [2, 1, 3]
        assert all(sum(s["token_logprobs"]) == s["logprob"] for s in result["continuations"])
    starts = [stream.params.prompt_logprobs_start for stream in engine.submitted[-12:] if not stream.params.logprobs]
    assert starts == [3, 3, 3, 2, 2, 2][-len(starts) :]
    single = client.post("/v1/loglikelihood", json=items[0]).json()
    assert single["continuations"] == answer["results"][0]["continuations"]
    assert answer["usage"]["prompt_tokens"] == 3 * 3 + 3 * 2 + 2 * 6
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"context": "a", "continuations": [""]}, "continuation is empty"),
        ({"context": [5], "continuations": [[]]}, "continuation is empty"),
        ({"context": [5], "continuations": [[900]]}, "token id 900"),
        ({"context": [-1], "continuations": [[5]]}, "token id -1"),
        ({"context": "a", "continuations": []}, "continuations"),
        ({"context": [5] * 600, "continuations": [[5]]}, "max_model_len"),
        ({"requests": []}, "requests"),
        ({"context": "a", "continuations": ["b"] * 2049}, "max_prompts=2048"),
        ({"context": "a", "continuations": ["b"] * 2100}, "max_prompts=2048"),
    ],
)
def test_scores_that_cannot_be_had_are_refused(client, engine, body, message):
    answer = client.post("/v1/loglikelihood", json=body)
    assert answer.status_code == 400
    assert message in answer.json()["error"]["message"]
    assert not engine.active


# ---- the shape of logprobs


def test_echo_has_the_prompt_then_the_answer(client, engine, tokenizer):
    choice = client.post(
        "/v1/completions", json={"prompt": "Hé", "echo": True, "logprobs": 2, "max_tokens": 20, "n": 2}
    ).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert choice["text"] == "Hé" + engine.answer
    assert len({len(values) for values in logprobs.values()}) == 1
    assert logprobs["token_logprobs"][0] is None is logprobs["top_logprobs"][0]
    assert None not in logprobs["token_logprobs"][1:]
    assert logprobs["tokens"][:3] == ["H", "bytes:\\xc3", "bytes:\\xa9"]
    assert logprobs["tokens"][-1] == tokenizer.eos_token
    for token, own, top in zip(*(logprobs[k][1:] for k in ("tokens", "token_logprobs", "top_logprobs")), strict=True):
        assert top[token] == own
        assert 2 <= len(top) <= 3


def test_text_offsets_point_into_the_text(client, engine):
    """Each token's text stands at its offset; a byte of a character has the character's."""
    for prompt in ("Hé 👍", [75, 131, 106]):
        choice = client.post(
            "/v1/completions", json={"prompt": prompt, "echo": True, "logprobs": 0, "max_tokens": 20}
        ).json()["choices"][0]
        text, logprobs = choice["text"], choice["logprobs"]
        assert logprobs["text_offset"][0] == 0
        for token, offset in zip(logprobs["tokens"][:-1], logprobs["text_offset"], strict=False):
            if token.startswith("bytes:"):
                assert ord(text[offset]) > 127
            else:
                assert text[offset : offset + len(token)] == token
        assert logprobs["text_offset"][-1] == len(text)  # EOS, which is no text


def test_streamed_logprobs_joined_are_the_whole(client):
    body = {"prompt": ["Hé", "x"], "echo": True, "logprobs": 1, "max_tokens": 20, "n": 2, "temperature": 0}
    whole = client.post("/v1/completions", json=body).json()["choices"]
    joined = [{"text": "", "logprobs": {name: [] for name in whole[0]["logprobs"]}} for _ in whole]
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                for piece in httpx.Response(200, text=line[6:]).json()["choices"]:
                    joined[piece["index"]]["text"] += piece["text"]
                    for name, values in (piece["logprobs"] or {}).items():
                        joined[piece["index"]]["logprobs"][name] += values
    assert joined == [{"text": choice["text"], "logprobs": choice["logprobs"]} for choice in whole]


def test_prompt_logprobs_as_vllm_writes_them(client, engine):
    choice = client.post("/v1/completions", json={"prompt": [5, 6], "prompt_logprobs": 1, "max_tokens": 1}).json()
    first, second = choice["choices"][0]["prompt_logprobs"]
    entry = engine.entry([5], 6, 1, None)
    assert first is None
    assert second["6"] == {"logprob": entry.logprob, "rank": entry.rank, "decoded_token": "#"}
    best = max(second.values(), key=lambda value: value["logprob"])
    assert best["rank"] == 1


def test_chat_logprobs_have_bytes_that_join_to_the_text(client, engine):
    answer = client.post(
        "/v1/chat/completions",
        json={"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 2, "max_tokens": 20},
    ).json()
    content = answer["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content[:-1]).decode() == engine.answer
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert all(
        entry["top_logprobs"][0]["logprob"] >= entry["top_logprobs"][1]["logprob"] for entry in content
    )  # best first


def test_ids_that_share_a_text_do_not_share_a_key():
    """`A` and `<0x41>` are one text. Had they one key, the actual token's value or the maximum could be lost."""
    vocabulary = Vocabulary(sentencepiece_tokenizer())
    letter, byte = 3 + 256 + 3, 3 + 0x41
    assert vocabulary.text_of(letter) == vocabulary.text_of(byte) == "A"
    writer = CompletionLogprobs(vocabulary, num_top=2, skip_special_tokens=True)
    for own, other in ((letter, byte), (byte, letter)):
        entry = TokenLogprob(own, -2.5, 2, [(other, -0.5), (own, -2.5)])
        [top] = writer.write([own], [entry])["top_logprobs"]
        assert top == {f"token_id:{other}": -0.5, "A": -2.5}
        assert list(top) == [f"token_id:{other}", "A"]  # best first


@pytest.mark.parametrize("make", [merged_tokenizer, sentencepiece_tokenizer])
def test_every_id_has_its_own_string_and_exact_bytes(make):
    tokenizer = make()
    vocabulary, ids = Vocabulary(tokenizer), list(range(len(tokenizer)))
    assert len(set(vocabulary.distinct([*ids, len(tokenizer)]))) == len(ids) + 1
    assert vocabulary.text_of(len(tokenizer)) == f"token_id:{len(tokenizer)}"
    assert "\ufffd" not in "".join(vocabulary.distinct(ids))
    text = " Hi 👍\n ab  ab é"
    joined = b"".join(vocabulary.bytes_of(id_) for id_ in tokenizer(text, add_special_tokens=False)["input_ids"])
    assert joined.decode().removeprefix(" ") == text.removeprefix(" ") or joined.decode() == " " + text


def test_tokens_as_text_agree_with_the_tokenizers_own_decoding():
    tokenizer = merged_tokenizer()
    vocabulary = Vocabulary(tokenizer)
    for token_id in range(len(tokenizer)):
        text = vocabulary.text_of(token_id)
        assert text.startswith("bytes:") or text == tokenizer.decode([token_id])


def test_minus_infinity_becomes_a_json_number_and_nan_does_not_pass(tokenizer):
    vocabulary = Vocabulary(tokenizer)
    [entry] = chat_logprobs(vocabulary, [TokenLogprob(5, float("-inf"), 3, [])], 0)["content"]
    assert entry["logprob"] == -9999.0
    [entry] = chat_logprobs(vocabulary, [TokenLogprob(5, float("nan"), 3, [])], 0)["content"]
    assert entry["logprob"] != entry["logprob"]


# ---- where a context ends


def harness_split(tokenizer: PreTrainedTokenizerBase, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The rule in words: trailing spaces change sides, the whole is tokenized, the context's own length is the cut."""
    spaces = len(context) - len(context.rstrip())
    if spaces:
        context, continuation = context[:-spaces], context[-spaces:] + continuation

    def encode(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    whole, border = encode(context + continuation), len(encode(context))
    return whole[:border], whole[border:]


@pytest.mark.parametrize("context", ["ab", "ab ", "ab  ", "x ab\n", "é", "ab c"])
@pytest.mark.parametrize("continuation", ["ab", " ab", "  ab", "b", "👍", "\n"])
def test_text_is_split_as_the_harness_splits_it(context, continuation):
    tokenizer = merged_tokenizer()
    pair = encode_pair(tokenizer, context, continuation, add_special_tokens=False)
    assert (pair.context, pair.continuation) == harness_split(tokenizer, context, continuation)
    with_bos = encode_pair(tokenizer, context, continuation)
    assert with_bos.context == [tokenizer.bos_token_id, *pair.context]
    assert with_bos.continuation == pair.continuation  # and no EOS, which this tokenizer would add


def test_a_continuation_that_melts_into_the_context_is_refused():
    tokenizer = merged_tokenizer()
    assert harness_split(tokenizer, "ab a", "b")[1] == []  # " a" + "b" is one token
    with pytest.raises(UserError, match="continuation 'b' merges with the end of its context"):
        encode_pair(tokenizer, "ab a", "b")


def test_an_empty_context_is_bos(tokenizer):
    merged = merged_tokenizer()
    for context in ("", []):
        for special in (True, False):
            assert encode_pair(merged, context, "ab", add_special_tokens=special).context == [merged.bos_token_id]
    bare = AutoTokenizer.from_pretrained(tiny_model(), bos_token=None, eos_token=None)
    with pytest.raises(UserError, match="neither BOS nor EOS"):
        encode_pair(bare, "", "ab")


def test_ids_are_taken_as_they_are():
    merged = merged_tokenizer()
    assert encode_pair(merged, [1, 2], [3]).context == [1, 2]
    ab = merged("ab", add_special_tokens=False)["input_ids"]
    assert encode_pair(merged, [1], "ab").continuation == ab
    assert encode_pair(merged, "ab", [3]).context == [merged.bos_token_id, *ab]


def test_a_prompt_has_bos_once_and_no_eos():
    tokenizer = merged_tokenizer()
    bos = tokenizer.bos_token_id
    assert encode_text(tokenizer, "ab").token_ids[0] == bos
    assert encode_text(tokenizer, "<s>ab").token_ids == encode_text(tokenizer, "ab").token_ids
    assert tokenizer.eos_token_id not in encode_text(tokenizer, "ab").token_ids
    assert encode_text(tokenizer, "ab</s>").token_ids[-1] == tokenizer.eos_token_id  # somebody wrote it
    prompt = encode_text(tokenizer, "é ab", offsets=True)
    assert len(prompt.offsets) == len(prompt.token_ids)


def test_ties_with_the_likeliest_token_are_greedy():
    assert score([TokenLogprob(5, -1.0, 2, [(6, -1.0), (5, -1.0)])])["is_greedy"]
    assert not score([TokenLogprob(5, -1.5, 2, [(6, -1.0), (5, -1.5)])])["is_greedy"]
