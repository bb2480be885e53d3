"""Open the model, build the engine, serve it."""

from trainer.serve.async_engine import AsyncEngine
from trainer.serve.build import build_engine
from trainer.serve.config import ServeConfig
from trainer.serve.http.server import serve
from trainer.serve.open_model import open_model


def run(config: ServeConfig) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code.

    raises  UserError if the model or a setting is not accepted
    """
    built = build_engine(open_model(config), config)
    if built.runner.parallel.rank > 0:
        built.runner.follow(built.adapters)
        return 0
    try:
        return serve(AsyncEngine(built), config)
    finally:
        built.close()
