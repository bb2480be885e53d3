"""ServeConfig: the knobs of engine and server, by vLLM's names; validated where they stand."""

from dataclasses import dataclass, field

from trainer.config.errors import require

KV_CACHE_DTYPES = ("auto", "int8")
QUANTIZATIONS = ("none", "nf4", "fp4", "int4", "int4_dynamic", "int8_dynamic")
DYNAMIC = ("int4_dynamic", "int8_dynamic")
"""Inputs of linear layers are rounded to 8 bits, one scale a token."""


@dataclass
class ServeConfig:
    """Everything `python -m trainer.serve` accepts as key=value, and `LLM(...)` as keyword arguments."""

    model: str = "smollm2_135m"
    """A run folder, an export folder, a Hugging Face folder, `org/name` on the hub, smollm2_135m or tiny."""
    tokenizer: str | None = None
    """Another folder or hub name for the tokenizer; null for the model's own."""
    dtype: str = "auto"
    """auto, bfloat16 or float32; auto as in training."""
    quantization: str | None = None
    """Packs a 16-bit model when it is loaded: nf4 or fp4 as in training; int4 in symmetric groups of 32; int4_dynamic
    the same, with inputs of linear layers rounded to 8 bits, one scale a token; int8_dynamic with these inputs and a
    scale per row of the weight. none serves it as it is; null: as the run was trained, else none."""
    adapters: list[str] = field(default_factory=list)
    """PEFT adapters to load at start: name=folder, each then a model name of its own."""
    max_loras: int = 32
    """Adapters that can be loaded at a time."""
    max_model_len: int | None = None
    """Longest prompt and answer together, in tokens; null for the model's own length, at most 8192."""

    kv_block_size: int = 16
    """Tokens in a KV block: 16, 32, 64, 128 or 256."""
    kv_cache_dtype: str = "auto"
    """auto is the compute dtype; int8 has a scale for each token and head."""
    kv_cache_memory_bytes: int | None = None
    """Memory of the KV cache; null: on a CPU a quarter of the memory that is free, at most 4 GiB and at most what
    max_num_seqs sequences of max_model_len need; on a GPU what gpu_memory_utilization leaves."""
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory for weights, activations and KV cache; without effect on a CPU."""
    swap_space: float = 0.0
    """GiB of host memory for the KV blocks of preempted sequences; 0: they are computed again."""
    enable_prefix_caching: bool = True
    """Keep KV blocks of finished requests findable for later prompts that begin alike."""

    max_num_seqs: int = 64
    """Sequences that run at a time."""
    max_num_batched_tokens: int | None = None
    """Tokens of one step, decodes first, prompts fill the rest; null for 512 on a CPU and 8192 on a GPU."""
    max_queue: int = 2048
    """Requests that may wait; the next one gets 429."""
    priority_aging_steps: int = 256
    """A waiting request moves up one priority level each so many steps, so that nobody starves."""
    batch_invariant: bool = True
    """Same prompt, same bits, whatever shares the batch, however it is cut, cached or preempted (CPU)."""
    screen_greedy: bool = True
    """Find greedy tokens through an 8-bit copy of the output head, where the processor makes it faster; the tokens stay
    the exact ones. The copy takes half of the head's memory."""
    num_speculative_tokens: int = 0
    """Tokens that prompt lookup proposes a step; 0 switches it off."""
    check: bool = False
    """Check the block accounting after each step; a violation ends the server."""
    tensor_parallel_size: int = 1
    """Processes that share each layer."""
    seed: int = 0
    """Seeds the requests that bring no seed of their own."""

    host: str = "127.0.0.1"
    """Address to listen at; 0.0.0.0 for every address of the machine."""
    port: int = 8000
    """Port to listen at; 0 for any free one, which the log names."""
    served_model_name: str | None = None
    """The base model's name in the API; null for the last part of `model`."""
    api_key: str | None = None
    """Bearer token that clients must send; null reads LOWBIT_API_KEY, and without it none is needed."""
    max_body_bytes: int = 8_000_000
    """Longest request body; longer ones get 413."""
    max_prompts: int = 2048
    """Prompts in one call of /v1/completions."""
    drain_s: float = 30.0
    """Seconds that running requests get to finish after SIGTERM."""

    def __post_init__(self) -> None:
        for name in (
            *("max_num_seqs", "max_queue", "priority_aging_steps", "max_loras", "tensor_parallel_size"),
            *("max_body_bytes", "max_prompts"),
        ):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}; give at least 1")
        for name in ("max_model_len", "max_num_batched_tokens", "kv_cache_memory_bytes"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"{name}={value}; give at least 1, or null")
        for name in ("swap_space", "num_speculative_tokens", "drain_s"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}; give 0 or more")
        require(
            self.kv_block_size in (16, 32, 64, 128, 256),
            f"kv_block_size={self.kv_block_size}; use 16, 32, 64, 128 or 256",
        )
        require(
            self.kv_cache_dtype in KV_CACHE_DTYPES,
            f"kv_cache_dtype={self.kv_cache_dtype}; use one of {', '.join(KV_CACHE_DTYPES)}",
        )
        require(self.dtype in ("auto", "bfloat16", "float32"), f"dtype={self.dtype}; use auto, bfloat16 or float32")
        require(
            self.quantization in (None, *QUANTIZATIONS),
            f"quantization={self.quantization}; use {', '.join(QUANTIZATIONS)} or null",
        )
        require(
            self.tensor_parallel_size == 1 or self.quantization not in DYNAMIC,
            f"quantization={self.quantization} scales each token's whole input, and tensor_parallel_size="
            f"{self.tensor_parallel_size} processes hold only a part of it each; use tensor_parallel_size=1, or "
            "quantization=int4, nf4 or fp4",
        )
        require(
            0 < self.gpu_memory_utilization <= 1,
            f"gpu_memory_utilization={self.gpu_memory_utilization}; give a share in (0, 1]",
        )
        require(0 <= self.port < 65536, f"port={self.port}; give 0 (any free port) to 65535")
        require(
            self.max_num_batched_tokens is None or self.max_num_batched_tokens >= self.max_num_seqs,
            f"max_num_batched_tokens={self.max_num_batched_tokens} is below max_num_seqs={self.max_num_seqs}: "
            "each running sequence needs a token a step; raise the one or lower the other",
        )
        for adapter in self.adapters:
            require("=" in adapter, f"adapters has {adapter!r}; give name=folder")
