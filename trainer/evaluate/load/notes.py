"""What a reader must know about a point before its figures: one sentence each."""

from typing import Any

from trainer.config.load import LoadConfig

PIECE_LIMIT = 1.05
"""Tokens a piece from which a gap between pieces is no gap between tokens."""


def notes(row: dict[str, Any], config: LoadConfig) -> list[str]:
    """Sentences about a point's row."""
    errors = [f"{n} x {kind}: {row['errors_say'][kind]}" for kind, n in sorted(row["errors"].items())]
    return [*errors, *_client(row, config), *_queue(row), *_answers(row, config)]


def _client(row: dict[str, Any], config: LoadConfig) -> list[str]:
    said = []
    for key, what in (("late_ms", "sent its requests"), ("client_lag_ms", "read its clock")):
        late = row[key].get("p99", 0.0)
        if late > config.max_late_ms:
            said.append(
                f"CLIENT LATE: this client {what} {late:.1f} ms late at p99, more than max_late_ms="
                f"{config.max_late_ms:g}; its machine is too busy for these figures"
            )
    return said


def _queue(row: dict[str, Any]) -> list[str]:
    if row["loop"] == "closed":
        return ["closed loop: a request is sent when there is room for it, so no queue is measured"]
    if row["saturated"]:
        steady = row["steady"]
        return [
            f"OVER-SATURATED: requests in flight grow by {steady['growth_per_s']:.3g} a second, "
            f"{steady['growth_share']:.0%} of the arrivals pile up; latencies say how long the run was"
        ]
    if row["saturated"] is None and row["rate"] != "inf":
        return ["too short to have a steady part: whether the queue grows is not known; raise num_requests"]
    return []


def _answers(row: dict[str, Any], config: LoadConfig) -> list[str]:
    said = []
    if (per_piece := row["tokens_per_piece"]) and per_piece > PIECE_LIMIT:
        said.append(f"a piece of the stream carries {per_piece:.2f} tokens: ITL is between pieces")
    got, asked = row["output_tokens"], row["asked_tokens"]
    if config.ignore_eos and got is not None and got < 0.99 * asked:
        said.append(f"answers ended early: {got:.1f} tokens of the {asked:.1f} asked for")
    return said
