"""What a user can mend: the error that says how."""


class UserError(ValueError):
    """A mistake that the user can mend. Its text names the key, the value, what is accepted and the next step."""


def require(condition: bool, message: str) -> None:
    """Raise `UserError(message)` unless `condition` holds."""
    if not condition:
        raise UserError(message)
