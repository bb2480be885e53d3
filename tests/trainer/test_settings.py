"""key=value arguments: typed as the schema says, refused by name."""

import pytest

from trainer.config.errors import UserError
from trainer.serve.config import ServeConfig
from trainer.settings import describe, read_settings


def test_values_have_the_types_of_the_schema() -> None:
    config = read_settings(ServeConfig, ["port=0", "check=true", "swap_space=0.5", "max_model_len=null", "model=a/b"])
    assert (config.port, config.check, config.swap_space, config.max_model_len) == (0, True, 0.5, None)
    assert config.model == "a/b"


@pytest.mark.parametrize("text", ["0123", "1e5", "1.10", "true"])
def test_text_stays_as_it_was_typed(text: str) -> None:
    """YAML would read an API key of digits as a number, octal at that."""
    assert read_settings(ServeConfig, [f"api_key={text}"]).api_key == text


def test_null_is_no_text() -> None:
    assert read_settings(ServeConfig, ["api_key=null"]).api_key is None


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("prt=1", "prt is not a key; did you mean port"),
        ("port", "port is no setting; write key=value"),
        ("port=many", "port=many"),
        ("port=70000", "port=70000"),
        ("kv_block_size=17", "kv_block_size=17; use 16"),
        ("max_num_batched_tokens=8", "below max_num_seqs"),
    ],
)
def test_mistakes_are_named(argument: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_settings(ServeConfig, [argument])


def test_help_says_every_key() -> None:
    text = describe(ServeConfig())
    assert all(f"  {name} = " in text for name in ServeConfig.__dataclass_fields__)
