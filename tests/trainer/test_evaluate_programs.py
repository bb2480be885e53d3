"""The programs that compute a model: the same figures as from whole logits, and how far they are from each other."""

import pytest
import torch

from trainer.config.errors import UserError
from trainer.config.evaluation import EvaluationConfig
from trainer.config.model import DType, named_model
from trainer.evaluate.quality.kept import Kept, loglikelihoods
from trainer.evaluate.quality.program import open_program, without_end
from trainer.evaluate.quality.server_program import ServerProgram
from trainer.evaluate.quality.subject import Subject
from trainer.evaluate.token_rows import KL, LOSS, LOSS_ORIGINAL, SAME
from trainer.model import load_model

PATHS = ("server", "module", "transformers")
LENGTHS = (150, 150, 17, 60, 2)
ROWS = [torch.randint(4, 260, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in LENGTHS]
LONGEST = 170


def subject(path, dtype="float32"):
    return Subject.of("tiny", path, dtype=dtype)


def tiny(amount=0.0):
    """The tiny model in float32, its weights moved by `amount`."""
    model, tokenizer = load_model(named_model("tiny", DType.float32))
    for parameter in model.parameters():
        parameter.data += amount * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1))
    return model, tokenizer


@pytest.fixture(scope="module")
def original():
    with open_program(subject("server"), longest=LONGEST) as program:
        kept = Kept.of(program, ROWS)
        return kept, program.tokenizer


@torch.inference_mode()
def whole(model):
    """[positions, vocab_size] float64: log-probabilities from transformers' own logits."""
    parts = [model(input_ids=torch.tensor([row])).logits[0, :-1].double().log_softmax(-1) for row in ROWS]
    return torch.cat(parts)


def test_divergence_is_that_of_whole_logits(original):
    """A changed model in the server, against transformers' logits of both."""
    kept, tokenizer = original
    changed, _ = tiny(0.02)
    program = ServerProgram(subject("server"), tokenizer=tokenizer, longest=LONGEST, module=changed)
    found = kept.compare(program)
    program.close()
    wanted, ours = whole(tiny()[0]), whole(changed)
    targets = torch.cat([torch.tensor(row[1:]) for row in ROWS])[:, None]
    kl = (wanted.exp() * (wanted - ours)).sum(1)
    assert found.counts == [length - 1 for length in LENGTHS]
    assert kl.mean() > 1e-3  # far above float32's noise
    torch.testing.assert_close(found.all(KL), kl, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found.all(LOSS), -ours.gather(1, targets)[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(found.all(LOSS_ORIGINAL), -wanted.gather(1, targets)[:, 0], rtol=1e-4, atol=1e-5)
    assert found.mean(SAME) == (ours.argmax(1) == wanted.argmax(1)).double().mean().item()


def test_the_floor_of_an_identical_computation_is_zero(original):
    """The server gives the same bits however rows share its steps."""
    for other in (False, True):
        with open_program(subject("server"), longest=LONGEST, other_batches=other) as program:
            found = original[0].compare(program)
            assert found.all(KL).abs().max() == 0 and found.mean(SAME) == 1


@pytest.mark.parametrize("path", ["module", "transformers"])
def test_the_floor_of_another_program_is_above_zero(path):
    """In bfloat16 sums in another order end in other last bits, and the divergence is small."""
    with open_program(subject("server", "bfloat16"), longest=LONGEST) as program:
        kept = Kept.of(program, ROWS)
    with open_program(subject(path, "bfloat16"), longest=LONGEST) as program:
        assert 0 < kept.compare(program).mean(KL) < 1e-5


@pytest.mark.parametrize("path", PATHS)
def test_programs_agree(original, path):
    """Divergence, answers and log-likelihoods, in float32, in both kinds of batches."""
    starts = [5, 149, 10, 1, 1]
    truth = [part[s - 1 :].sum().item() for part, s in zip(_own_logprobs(), starts, strict=True)]
    with open_program(subject("server"), longest=LONGEST) as program:
        wanted = program.answers([row[:12] for row in ROWS], max_new_tokens=6)
    for other in (False, True):
        with open_program(subject(path), longest=LONGEST, other_batches=other) as program:
            assert original[0].compare(program).all(KL).max() < 1e-6
            assert program.answers([row[:12] for row in ROWS], max_new_tokens=6) == wanted
            assert loglikelihoods(program, ROWS, starts) == pytest.approx(truth, abs=1e-3)


def _own_logprobs():
    targets = torch.cat([torch.tensor(row[1:]) for row in ROWS])[:, None]
    return whole(tiny()[0]).gather(1, targets)[:, 0].split([length - 1 for length in LENGTHS])


def test_logits_are_kept_in_a_file_and_removed():
    with open_program(subject("transformers"), longest=LONGEST) as program:
        kept = Kept.of(program, ROWS)
        folder = kept._folder.name
        assert "logits of 374 positions in a file" in kept.description
        assert kept.compare(program).all(KL).abs().max() == 0
    kept.close()
    with pytest.raises(FileNotFoundError):
        open(f"{folder}/logits")


def test_a_full_disk_is_said_before_logits_are_kept(monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda folder: type("Usage", (), {"free": 1000}))
    with open_program(subject("transformers"), longest=LONGEST) as program:
        with pytest.raises(UserError, match="lower windows or window, set TMPDIR, or use path=server"):
            Kept.of(program, ROWS)


def test_hidden_states_are_what_the_server_keeps(original):
    assert "hidden states of 374 positions in memory" in original[0].description


def test_llama_cpp(original):
    """The model as a BF16 file in llama.cpp: close to itself in the server, and not the same sums."""
    pytest.importorskip("llama_cpp", reason="pip install -e '.[bench]'")
    kept, tokenizer = original
    answers = []
    for other in (False, True):
        with open_program(
            subject("llama_cpp", "bfloat16"), tokenizer=tokenizer, longest=LONGEST, other_batches=other
        ) as program:
            assert 0 < kept.compare(program).mean(KL) < 1e-5
            answers.append(program.answers([row[:12] for row in ROWS], max_new_tokens=6))
            assert loglikelihoods(program, ROWS, [1] * 5) == pytest.approx(
                [part.sum().item() for part in _own_logprobs()], rel=1e-3
            )
    assert answers[0] == answers[1] and all(len(answer) <= 6 for answer in answers[0])


def test_answers_end_before_their_end():
    assert without_end([5, 6, 2, 7], (2, 3)) == [5, 6] and without_end([5], ()) == [5]


def test_transformers_refuses_our_codes(tmp_path):
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "lowbit"}}')
    with pytest.raises(UserError, match="path=module or server"):
        with open_program(Subject.of(str(tmp_path), "transformers"), longest=8):
            pass


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"run": ""}, "run is not set"),
        ({"run": "tiny", "path": "vllm"}, "path=vllm; use one of server"),
        ({"run": "tiny@gpu"}, "run has @gpu"),
        ({"run": "tiny", "windows": 0}, "windows=0; give at least 1"),
        ({"run": "tiny", "text": "nowhere.txt"}, "text=nowhere.txt is no file"),
        ({"run": "tiny", "shots": 2}, "shots=2 needs gsm8k"),
        ({"run": "tiny", "task_data": ["a=b"]}, "no effect without tasks"),
        ({"run": "tiny", "path": "module", "tasks": "shipped"}, "asks our server"),
    ],
)
def test_settings_that_are_refused(settings, match):
    with pytest.raises(UserError, match=match):
        EvaluationConfig(**settings)


def test_a_candidate_can_name_its_program():
    config = EvaluationConfig(run="tiny@module, org/name ,a@b/c@server", path="transformers")
    assert config.candidates == [("tiny", "module"), ("org/name", "transformers"), ("a@b/c", "server")]
