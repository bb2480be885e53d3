"""create_app: the routes, each a few lines between HTTP and the modules that do the work.

OpenAI's endpoints under /v1, vLLM's (/tokenize, adapters, /metrics), scoring for evaluation, and the live page.
"""

from pathlib import Path
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.responses import FileResponse, JSONResponse

from trainer import __version__
from trainer.config.errors import require
from trainer.serve.http.body import JsonRoute
from trainer.serve.http.chat import num_chars, render_chat
from trainer.serve.http.chat_completions import chat
from trainer.serve.http.completions import complete
from trainer.serve.http.errors import ERROR_RESPONSES, ApiError, install_error_handlers
from trainer.serve.http.guard import ApiKeyGuard, wanted_key
from trainer.serve.http.prompts import BARE_BASE, beside_the_loop, check_ids, encode_text, route_model
from trainer.serve.http.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LoadAdapterRequest,
    LoglikelihoodRequest,
    TokenizeRequest,
    UnloadAdapterRequest,
)
from trainer.serve.http.scoring import loglikelihood
from trainer.serve.http.vocabulary import Vocabulary
from trainer.serve.interface import Engine
from trainer.serve.metrics import CONTENT_TYPE

PAGE_DIR = Path(__file__).parent / "page"


def create_app(engine: Engine) -> FastAPI:
    """The HTTP application for an engine; starting and stopping the engine is the caller's."""
    # The interactive documentation loads scripts from elsewhere, so only the schema is offered.
    app = FastAPI(title="lowbit", version=__version__, docs_url=None, redoc_url=None)
    app.state.engine = engine
    install_error_handlers(app)
    for router in (_generation_routes(engine), _model_routes(engine), _token_routes(engine), _operation_routes(engine)):
        app.include_router(router)
    pages = _add_page(app)
    if key := wanted_key(engine.config.api_key):
        app.add_middleware(ApiKeyGuard, key=key, open_paths=frozenset({"/health", *pages}))
    return app


def _router() -> APIRouter:
    return APIRouter(route_class=JsonRoute, responses=ERROR_RESPONSES)


def _generation_routes(engine: Engine) -> APIRouter:
    router, vocabulary = _router(), Vocabulary(engine.tokenizer)

    @router.post("/v1/completions")
    async def completions(request: Request, body: CompletionRequest) -> Response:
        return await complete(engine, vocabulary, request, body)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: Request, body: ChatRequest) -> Response:
        return await chat(engine, vocabulary, request, body)

    @router.post("/v1/loglikelihood")
    async def score(request: Request, body: LoglikelihoodRequest) -> Response:
        return JSONResponse(await loglikelihood(engine, request, body))

    return router


def _model_routes(engine: Engine) -> APIRouter:
    router = _router()

    @router.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": _models(engine)}

    @router.get("/v1/models/{model_id:path}")
    async def model(model_id: str) -> dict[str, Any]:
        route_model(engine, model_id)
        return next(model for model in _models(engine) if model["id"] == model_id)

    @router.post("/v1/load_lora_adapter")
    async def load_adapter(body: LoadAdapterRequest) -> dict[str, Any]:
        require(
            body.lora_name not in (engine.model_name, BARE_BASE),
            f"lora_name={body.lora_name} is the base model's name; give another one",
        )
        await engine.load_adapter(body.lora_name, body.lora_path)
        return {"loaded": body.lora_name}

    @router.post("/v1/unload_lora_adapter")
    async def unload_adapter(body: UnloadAdapterRequest) -> dict[str, Any]:
        await engine.unload_adapter(body.lora_name)
        return {"unloaded": body.lora_name}

    return router


def _models(engine: Engine) -> list[dict[str, Any]]:
    def describe(name: str, root: str, parent: str | None) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": engine.model_created,
            "owned_by": "lowbit",
            "root": root,
            "parent": parent,
            "max_model_len": engine.max_model_len,
        }

    base = BARE_BASE if engine.default_adapter is not None else engine.model_name
    adapters = [
        describe(name, str(about["path"]), base) | {"rank": about["rank"], "sha256": about["sha256"]}
        for name, about in sorted(engine.adapters().items())
    ]
    served = describe(engine.model_name, engine.config.model, None if base == engine.model_name else base)
    bare = [] if base == engine.model_name else [describe(base, engine.config.model, None)]
    return [served, *bare, *adapters]


def _token_routes(engine: Engine) -> APIRouter:
    router, tokenizer = _router(), engine.tokenizer

    @router.post("/tokenize")
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        route_model(engine, body.model)
        fields = body.chat_fields()
        if fields is None:
            special = body.add_special_tokens is not False
            prompt = await beside_the_loop(
                len(body.prompt), encode_text, tokenizer, body.prompt, add_special_tokens=special
            )
            token_ids = prompt.token_ids
        else:
            token_ids = await beside_the_loop(num_chars(fields), render_chat, tokenizer, fields)
        return {"tokens": token_ids, "count": len(token_ids), "max_model_len": engine.max_model_len}

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        route_model(engine, body.model)
        check_ids(body.tokens, len(tokenizer), "tokens")
        return {"prompt": tokenizer.decode(body.tokens, clean_up_tokenization_spaces=False)}

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> dict[str, Any]:
        names = ("bos_token", "eos_token", "pad_token", "unk_token", "chat_template")
        return {
            "tokenizer_class": type(tokenizer).__name__,
            **{name: getattr(tokenizer, name, None) for name in names},
            "vocab_size": len(tokenizer),
            "max_model_len": engine.max_model_len,
        }

    return router


def _operation_routes(engine: Engine) -> APIRouter:
    router = _router()

    @router.head("/health", include_in_schema=False)  # what some load balancers send
    @router.get("/health")
    async def health() -> dict[str, str]:
        if not engine.is_healthy():
            raise ApiError(503, "the engine has failed or is shutting down", code="engine_unavailable")
        return {"status": "ok"}

    @router.get("/version")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(engine.metrics.render(), media_type=CONTENT_TYPE)

    @router.get("/state")
    async def state() -> dict[str, Any]:
        return await engine.state()

    return router


def _add_page(app: FastAPI) -> list[str]:
    """Serve the live page's files, index.html as /; returns their paths, which need no key."""
    files = sorted(path for path in PAGE_DIR.glob("*") if path.is_file() and path.suffix != ".py")
    paths = []
    for file in files:
        paths.append("/" if file.name == "index.html" else f"/{file.name}")
        app.add_api_route(paths[-1], _page_endpoint(file), methods=["GET", "HEAD"], include_in_schema=False)
    return paths


def _page_endpoint(file: Path) -> Any:
    async def endpoint() -> FileResponse:
        return FileResponse(file, headers={"Cache-Control": "no-cache"})

    return endpoint
