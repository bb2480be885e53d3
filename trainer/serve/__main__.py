"""`python -m trainer.serve model=<run folder, export folder, hub name, smollm2_135m> [key=value ...]`

Exits with 0 after SIGTERM or Ctrl-C, 2 after a user's mistake, 1 when the engine has failed.
"""

import logging
import sys

from trainer.config.errors import UserError
from trainer.serve.config import ServeConfig
from trainer.settings import describe, read_settings

_HELP = """lowbit serve: an OpenAI-compatible server for what was trained.

    python -m trainer.serve model=<model> [key=value ...]
    torchrun --standalone --nproc_per_node=2 -m trainer.serve model=<model> tensor_parallel_size=2

Every key with its default:

%s
"""


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if any(argument in ("-h", "--help") for argument in arguments):
        print(_HELP % describe(ServeConfig()))
        return
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout)
    logging.getLogger("trainer").setLevel(logging.INFO)
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # it tells of optional kernels each time it is imported
    try:
        config = read_settings(ServeConfig, arguments)
        from trainer.serve.run import run  # here, so that a mistake is answered before torch loads

        sys.exit(run(config))
    except UserError as error:
        sys.exit(_fail(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(error: UserError) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
