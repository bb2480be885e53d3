"""lowbit: fine-tune language models in 4 bits and serve exactly what was trained.

Public names load on first use (PEP 562), so that `import trainer` costs nothing and a mistake in a
config is answered before torch is imported. In a checkout `kernels/` and `conf/` lie beside this
package; they are mounted here as `trainer.kernels` and `trainer.conf`, as a wheel has them.
"""

from importlib import import_module
from pathlib import Path

__version__ = "0.1.0"

_PUBLIC = {
    "Config": "trainer.config.schema",
    "load_config": "trainer.compose",
    "UserError": "trainer.config.errors",
    "finetune": "trainer.run",
    "PtqConfig": "trainer.config.ptq",
    "quantize": "trainer.ptq.run",
    "Quantizer": "trainer.quantizer",
    "QuantizedTensor": "trainer.quantizer",
    "QuantLinear": "trainer.linear",
    "load_model": "trainer.model",
    "LLM": "trainer.serve.llm",
    "SamplingParams": "trainer.serve.sampling_params",
}
__all__ = ["__version__", *_PUBLIC]

if not (Path(__file__).parent / "kernels").is_dir():
    __path__.append(str(Path(__file__).parent.parent))


def __getattr__(name: str) -> object:
    if name not in _PUBLIC:
        raise AttributeError(f"module 'trainer' has no attribute {name!r}; it has {', '.join(__all__)}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
