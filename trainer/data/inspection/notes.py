"""The counts in sentences: what a person should know before a run, the gravest first."""

from collections.abc import Iterator

from trainer.data.inspection.conventions import Conventions
from trainer.data.inspection.report import Inspection

_SHOWN = 80


def notes_of(found: Inspection) -> list[str]:
    """One sentence each; the first ones say why training would not start."""
    return [
        *(f"training would stop: {refusal}" for refusal in found.refusals),
        *_of_rows(found),
        *_of_leaks(found),
        *_of_conventions(found.conventions),
        *_of_characters(found),
    ]


def _of_rows(found: Inspection) -> Iterator[str]:
    if found.first_rows is not None:
        yield f"a stream: only the first {found.first_rows} rows of each source were looked at"
    for kind, (count, places) in found.bad_kinds.items():
        yield f"{count} {_rows(count)} left out, {kind}: {', '.join(places)}{' ...' * (count > len(places))}"
    if truncated := found.total("truncated_rows"):
        yield f"{truncated} {_rows(truncated)} cut to data.max_seq_len={found.max_seq_len}"
    if special := found.total("special_rows"):
        yield f"{special} {_rows(special)} hold special tokens in what is said; models read them as the template's own"
    if split := found.total("split_rows"):
        yield f"{split} source {_rows(split)} became several rows of tokens"
    if count := len(found.duplicates.rows):
        first = " = ".join(found.duplicates.groups[0][:3])
        yield f"{count} {_rows(count)} equal an earlier one, token by token, such as {first}"


def _of_leaks(found: Inspection) -> Iterator[str]:
    leaks = found.leaks
    if leaks.copies:
        yield f"{leaks.copies} training {_rows(leaks.copies)} dropped as copies of held-out rows: {leaks.copied[0]}"
    if leaks.prompt_rows:
        first = leaks.prompts[0]
        yield (
            f"{leaks.prompt_rows} of {leaks.held_out_rows} held-out prompts have another answer in training: "
            f"{first.held_out} and {first.train}"
        )
    if leaks.run_rows:
        first = leaks.runs[0]
        yield (
            f"{leaks.run_rows} of {leaks.held_out_rows} held-out rows ({leaks.run_share:.1%}) share a run of at least "
            f"{leaks.run_len} tokens with a training row; the longest, {first.tokens}: {first.held_out} and "
            f"{first.train}"
        )
    if leaks.instruction_rows:
        yield (
            f"{leaks.instruction_rows} held-out rows begin or go on with text that so many training rows have that it "
            "is taken for an instruction and no leak"
        )


def _of_conventions(found: Conventions) -> Iterator[str]:
    if found.added_documents:
        yield (
            f"{found.added_documents} of {found.documents} documents begin with what no row says and the chat template "
            f"adds: {_short(found.added)}"
        )
    if found.added_to_system:
        yield f"before a row's own system prompt the chat template says {_short(found.added_to_system)}"
    if found.has_date:
        yield "the chat template writes the day's date: the same rows give other tokens tomorrow"
    yield from _of_bos(found)
    if found.unknown:
        yield f"{found.unknown} tokens say that the vocabulary has no token for what stood there"
    if not found.end_stops:
        end, count = next(iter(found.ends.items()))
        yield (
            f"{count} of {found.stretches} learned stretches end with {_short(end)}, at which the model's "
            f"generation_config.json does not stop (it stops at {', '.join(found.stops) or 'nothing'}): add it to "
            "eos_token_id there, or engines write on behind the answer"
        )
    elif found.stopped < found.stretches:
        rest = found.stretches - found.stopped
        yield f"{rest} of {found.stretches} learned stretches end without a token at which generation stops"


def _of_bos(found: Conventions) -> Iterator[str]:
    for number, count in found.bos_counts.items():
        if number > 1:
            yield f"{count} documents have {number} BOS tokens ({found.bos}); give texts without it"
    none, one = found.bos_counts.get(0, 0), found.bos_counts.get(1, 0)
    if none and (one or found.bos_expected):
        yield f"{none} of {found.documents} documents have no BOS ({found.bos}), with which the tokenizer begins a text"


def _of_characters(found: Inspection) -> Iterator[str]:
    if found.characters.part < 1:
        yield f"characters were counted in {found.characters.part:.0%} of the tokens, spread over the rows"
    for name, script in found.characters.broken().items():
        examples = " ".join(char for char, _ in script.examples.most_common(5))
        yield (
            f"{name}: {script.share:.0%} of {script.characters} characters take several tokens each, none of which is "
            f"a whole character ({examples})"
        )
    if found.characters.damaged:
        yield (
            f"{found.characters.damaged} times U+FFFD: text that was read in the wrong encoding before, or was cut "
            "within a character"
        )


def _rows(count: int) -> str:
    return "row" if count == 1 else "rows"


def _short(text: str) -> str:
    return repr(text if len(text) <= _SHOWN else f"{text[: _SHOWN // 2]} ... {text[-_SHOWN // 2 :]}")
