"""The paged KV cache (PagedAttention, arXiv:2309.06180): its layouts, and writing keys and values into it.

Slots. Token n of sequence b lies in block block_tables[b, n // block_size] at offset n % block_size; its slot is
block * block_size + offset. An int8 cache keeps codes rint(x / scale) and one float32 scale = absmax / 127 for each
token and KV head, for keys and values apart.

Layouts of one layer, chosen when the cache is allocated:
    plain    k, v [num_blocks, num_kv_heads, block_size, head_dim]                        Triton and the reference
    packed   k    [num_blocks, num_kv_heads, head_dim / pair, block_size, pair]           C++
             v    [num_blocks, num_kv_heads, block_size, head_dim rounded up to 16]
    scales   [num_blocks, num_kv_heads, block_size] float32
pair is 1 for float32, else 2: a packed vector of 16 keys holds one pair of dimensions of each, which meets a broadcast
pair of q in a bfloat16 dot instruction, so that no sum ever crosses lanes.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainer.kernels import _cpp, _tape
from trainer.kernels._triton import tl, triton
from trainer.kernels.int8 import divide

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPE_IDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2, torch.int8: 3}  # cpp/lowbit.h
MAX_BLOCK_SIZE = 256
MAX_HEAD_DIM = 256
_LANES = 16  # keys of one vector: block_size is a multiple, and so is the width of packed values


# ---- the cache


@dataclass(slots=True)
class KVLayer:
    """One layer of a KVCache: the tensors in one of the layouts above, and the sizes that follow from their shapes."""

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None
    num_kv_heads: int = field(init=False)
    head_dim: int = field(init=False)
    block_size: int = field(init=False)
    packed: bool = field(init=False)
    descriptor: Tensor | None = field(init=False)  # what the C++ kernels read, as one argument

    def __post_init__(self) -> None:
        _, self.num_kv_heads, self.block_size, self.head_dim = self.v.shape
        self.packed = self.k.dim() == 5
        self.descriptor = None
        if self.packed:
            self.head_dim = self.k.shape[2] * self.k.shape[4]
            tensors = self.k, self.v, self.k_scale, self.v_scale
            pointers = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
            sizes = [self.num_kv_heads, self.head_dim, self.block_size, DTYPE_IDS[self.k.dtype]]
            self.descriptor = torch.tensor([*pointers, *sizes], dtype=torch.int64)

    def key_slots(self) -> Tensor:
        """A view [num_blocks, block_size, num_kv_heads, head_dim / pair, pair]."""
        return _key_slots(self.k[None])[0]

    def value_slots(self) -> Tensor:
        """A view [num_blocks, block_size, num_kv_heads, head_dim]."""
        return _value_slots(self.v[None], self.head_dim)[0]


@dataclass(slots=True)
class KVCache:
    """Keys and values of all layers in blocks of `block_size` tokens; made by `allocate`."""

    k: Tensor  # [num_layers, *a layer's k]
    v: Tensor
    k_scale: Tensor | None
    v_scale: Tensor | None
    compute_dtype: torch.dtype
    layers: list[KVLayer] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        scales = (None,) * len(self.k) if self.k_scale is None else self.k_scale
        value_scales = (None,) * len(self.k) if self.v_scale is None else self.v_scale
        self.layers = [KVLayer(*tensors) for tensors in zip(self.k, self.v, scales, value_scales, strict=True)]

    @classmethod
    def allocate(
        cls,
        num_layers: int,
        num_blocks: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device | str,
    ) -> "KVCache":
        """An uninitialised cache in the layout of the implementation that `_cpp.choose` names now.

        head_dim       even, 16..256, and the smaller 2..14 of tiny models
        block_size     tokens of a block, a multiple of 16 up to 256
        dtype          compute_dtype, or int8
        compute_dtype  float32, bfloat16 or float16: the dtype of qkv
        raises         ValueError if a size or dtype is not one of these
        """
        device = torch.device(device)
        _check_sizes(num_layers, num_blocks, num_kv_heads, head_dim, block_size, dtype, compute_dtype)
        packed = _is_packed(compute_dtype, device)
        k_shape, v_shape = _block_shapes(num_kv_heads, head_dim, block_size, dtype, packed)
        k = torch.empty(num_layers, num_blocks, *k_shape, dtype=dtype, device=device)
        v = torch.empty(num_layers, num_blocks, *v_shape, dtype=dtype, device=device)
        if dtype != torch.int8:
            return cls(k, v, None, None, compute_dtype)
        scale_shape = num_layers, num_blocks, num_kv_heads, block_size
        k_scale, v_scale = (torch.empty(scale_shape, dtype=torch.float32, device=device) for _ in range(2))
        return cls(k, v, k_scale, v_scale, compute_dtype)

    @staticmethod
    def block_bytes(
        num_layers: int,
        *,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        dtype: torch.dtype,
        compute_dtype: torch.dtype,
        device: torch.device | str,
    ) -> int:
        """Bytes of one block over all layers, scales and padding included; the arguments of `allocate`."""
        _check_sizes(num_layers, 1, num_kv_heads, head_dim, block_size, dtype, compute_dtype)
        packed = _is_packed(compute_dtype, torch.device(device))
        shapes = _block_shapes(num_kv_heads, head_dim, block_size, dtype, packed)
        scales = 2 * 4 * num_kv_heads * block_size if dtype == torch.int8 else 0
        return num_layers * (sum(map(_numel, shapes)) * dtype.itemsize + scales)

    @property
    def num_layers(self) -> int:
        return self.k.shape[0]

    @property
    def num_blocks(self) -> int:
        return self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.v.shape[2]

    @property
    def block_size(self) -> int:
        return self.v.shape[3]

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * self.k.shape[5] if self.packed else self.k.shape[4]

    @property
    def dtype(self) -> torch.dtype:
        return self.k.dtype

    @property
    def device(self) -> torch.device:
        return self.k.device

    @property
    def packed(self) -> bool:
        return self.k.dim() == 6

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors())

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks over all layers, for copy-on-write; all sources are read before a destination is written.

        pairs   (source block, destination block)
        raises  ValueError if a block is not in the cache
        """
        self.copy_to(self, pairs)

    def copy_to(self, other: "KVCache", pairs: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of this cache into blocks of another, which may lie on another device in another layout.

        pairs   (block of self, block of other)
        raises  ValueError if the caches differ in sizes or dtype, or if a block is not in its cache
        """
        if not pairs:
            return
        if self._block_kind() != other._block_kind():
            raise ValueError(
                f"blocks of {self._block_kind()} cannot be copied to {other._block_kind()}; allocate alike"
            )
        sources = self._block_index("source", [source for source, _ in pairs])
        destinations = other._block_index("destination", [destination for _, destination in pairs])
        if self.packed == other.packed:
            for source, destination in zip(self._tensors(), other._tensors(), strict=True):
                destination[:, destinations] = source[:, sources].to(other.device)
            return
        keys = _key_slots(self.k)[:, sources].flatten(-2).to(other.device)
        slots = _key_slots(other.k)
        slots[:, destinations] = keys.unflatten(-1, slots.shape[-2:])
        values = _value_slots(self.v, self.head_dim)[:, sources].to(other.device)
        _value_slots(other.v, self.head_dim)[:, destinations] = values
        for source, destination in zip(self._tensors()[2:], other._tensors()[2:], strict=True):
            destination[:, destinations] = source[:, sources].to(other.device)

    def gather(self, layer: int, block_table: Sequence[int], length: int) -> tuple[Tensor, Tensor]:
        """The first `length` keys and values of a sequence, dequantized.

        block_table  at least ceil(length / block_size) blocks
        returns      k, v [length, num_kv_heads, head_dim] float32
        """
        return gather_kv(self.layers[layer], torch.tensor(block_table, dtype=torch.int64, device=self.device), length)

    def _tensors(self) -> list[Tensor]:
        return [tensor for tensor in (self.k, self.v, self.k_scale, self.v_scale) if tensor is not None]

    def _block_kind(self) -> str:
        sizes = f"num_layers={self.num_layers} num_kv_heads={self.num_kv_heads} head_dim={self.head_dim}"
        return f"KVCache({sizes} block_size={self.block_size} dtype={self.dtype})"

    def _block_index(self, name: str, blocks: list[int]) -> Tensor:
        if min(blocks) < 0 or max(blocks) >= self.num_blocks:
            raise ValueError(f"{name} blocks {blocks} are not all in 0..{self.num_blocks - 1}; check the block tables")
        return torch.tensor(blocks, device=self.device)


def _is_packed(compute_dtype: torch.dtype, device: torch.device) -> bool:
    """C++ has no float16 arithmetic: a float16 cache on a CPU is the reference's."""
    return compute_dtype != torch.float16 and _cpp.choose("paged_attention", device.type) == "cpu"


def _block_shapes(
    num_kv_heads: int, head_dim: int, block_size: int, dtype: torch.dtype, packed: bool
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    if not packed:
        return ((num_kv_heads, block_size, head_dim),) * 2
    pair = 1 if dtype == torch.float32 else 2
    return (num_kv_heads, head_dim // pair, block_size, pair), (num_kv_heads, block_size, -(-head_dim // 16) * 16)


def _numel(shape: tuple[int, ...]) -> int:
    return functools.reduce(int.__mul__, shape, 1)


def _key_slots(k: Tensor) -> Tensor:
    """[layers, *a layer's k] -> a view [layers, num_blocks, block_size, num_kv_heads, head_dim / pair, pair]"""
    return k.permute(0, 1, 4, 2, 3, 5) if k.dim() == 6 else k.transpose(2, 3).unsqueeze(-1)


def _value_slots(v: Tensor, head_dim: int) -> Tensor:
    """[layers, *a layer's v] -> a view [layers, num_blocks, block_size, num_kv_heads, head_dim]"""
    return v.transpose(2, 3)[..., :head_dim]


# ---- checks shared by all implementations


def _check_sizes(
    num_layers: int,
    num_blocks: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> None:
    if block_size % _LANES or not 0 < block_size <= MAX_BLOCK_SIZE:
        raise ValueError(f"block_size={block_size} is not a multiple of 16 up to {MAX_BLOCK_SIZE}; use 16, 32 or 64")
    if head_dim % 2 or not 0 < head_dim <= MAX_HEAD_DIM:
        raise ValueError(f"head_dim={head_dim} is not an even number up to {MAX_HEAD_DIM}; this model is not supported")
    if compute_dtype not in DTYPES:
        raise ValueError(f"compute_dtype={compute_dtype} is unknown; use one of {', '.join(map(str, DTYPES))}")
    if dtype not in (compute_dtype, torch.int8):
        raise ValueError(f"dtype={dtype} of a KV cache is neither compute_dtype={compute_dtype} nor torch.int8")
    if min(num_layers, num_blocks, num_kv_heads) < 1:
        sizes = f"num_layers={num_layers} num_blocks={num_blocks} num_kv_heads={num_kv_heads}"
        raise ValueError(f"{sizes}: each must be at least 1; give the KV cache more memory or use a smaller model")


def check_qkv(qkv: Tensor, layer: KVLayer, num_tokens: int, num_heads: int) -> None:
    """One cheap condition, since a decode step asks for each layer; the message looks closer."""
    columns = (num_heads + 2 * layer.num_kv_heads) * layer.head_dim
    if qkv.shape == (num_tokens, columns) and num_heads % layer.num_kv_heads == 0 and qkv.stride(1) == 1:
        # C++ would read float16 as bfloat16.
        accepted = DTYPES[:2] if layer.packed else DTYPES
        if qkv.dtype == layer.k.dtype or (layer.k_scale is not None and qkv.dtype in accepted):
            return
    raise ValueError(
        f"qkv is {qkv.dtype} {tuple(qkv.shape)} with strides {qkv.stride()}; num_heads={num_heads} (a multiple of "
        f"{layer.num_kv_heads} KV heads), head_dim={layer.head_dim} and {num_tokens} slots need row-contiguous "
        f"[{num_tokens}, {columns}] of the cache's compute dtype"
    )


# ---- the reference


def write_kv_reference(qkv: Tensor, layer: KVLayer, slot_mapping: Tensor, *, num_heads: int) -> None:
    kept = slot_mapping >= 0
    block = slot_mapping[kept] // layer.block_size
    offset = slot_mapping[kept] % layer.block_size
    _, k, v = split_qkv(qkv[kept], layer, num_heads)
    if layer.k_scale is not None:
        k, k_scale = _quantize(k)
        v, v_scale = _quantize(v)
        layer.k_scale.transpose(1, 2)[block, offset] = k_scale
        layer.v_scale.transpose(1, 2)[block, offset] = v_scale
    key_slots = layer.key_slots()
    key_slots[block, offset] = k.unflatten(-1, key_slots.shape[-2:])
    layer.value_slots()[block, offset] = v


def split_qkv(qkv: Tensor, layer: KVLayer, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (num_heads + 2 * num_kv_heads) * head_dim] -> q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim]"""
    sizes = num_heads, layer.num_kv_heads, layer.num_kv_heads
    return qkv.unflatten(1, (-1, layer.head_dim)).split(sizes, dim=1)


def _quantize(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., head_dim] float -> codes [..., head_dim] int8, scale [...] float32"""
    x = x.float()
    scale = divide(x.abs().amax(-1), 127)
    codes = (x / scale[..., None]).round().clamp(-127, 127)
    return codes.where(scale[..., None] > 0, 0).to(torch.int8), scale


def gather_kv(layer: KVLayer, block_table: Tensor, length: int) -> tuple[Tensor, Tensor]:
    position = torch.arange(length, device=block_table.device)
    block, offset = block_table[position // layer.block_size], position % layer.block_size
    k = layer.key_slots()[block, offset].flatten(-2).float()
    v = layer.value_slots()[block, offset].float()
    if layer.k_scale is None:
        return k, v
    k_scale, v_scale = (scale.transpose(1, 2)[block, offset] for scale in (layer.k_scale, layer.v_scale))
    return k * k_scale[..., None], v * v_scale[..., None]


# ---- C++


def write_kv_cpu(qkv: Tensor, layer: KVLayer, slot_mapping: Tensor, *, num_heads: int) -> None:
    function = _tape.kernel("paged_attention", "write_kv")
    kind = DTYPE_IDS[qkv.dtype]
    _tape.call(function, qkv, qkv.stride(0), kind, slot_mapping, slot_mapping.shape[0], num_heads, layer.descriptor)


# ---- Triton, on the plain layout


@triton.jit
def _write_kv_kernel(
    qkv_ptr, slot_mapping_ptr, k_ptr, v_ptr, k_scale_ptr, v_scale_ptr,
    stride_qkv_row, num_heads, num_kv_heads, block_size,
    HEAD_DIM: tl.constexpr, INT8: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """A program stores one token of one KV head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    slot = tl.load(slot_mapping_ptr + token)
    if slot >= 0:
        block = slot // block_size
        offset = slot % block_size
        dim = tl.arange(0, BLOCK_K)
        mask = dim < HEAD_DIM
        row_ptr = qkv_ptr + token * stride_qkv_row
        k = tl.load(row_ptr + (num_heads + head) * HEAD_DIM + dim, mask=mask, other=0.0)
        v = tl.load(row_ptr + (num_heads + num_kv_heads + head) * HEAD_DIM + dim, mask=mask, other=0.0)
        head_slot = (block * num_kv_heads + head) * block_size + offset
        start = head_slot * HEAD_DIM
        if INT8:
            k_codes, k_scale = _quantize_row(k.to(tl.float32))
            v_codes, v_scale = _quantize_row(v.to(tl.float32))
            tl.store(k_scale_ptr + head_slot, k_scale)
            tl.store(v_scale_ptr + head_slot, v_scale)
            tl.store(k_ptr + start + dim, k_codes, mask=mask)
            tl.store(v_ptr + start + dim, v_codes, mask=mask)
        else:
            tl.store(k_ptr + start + dim, k, mask=mask)
            tl.store(v_ptr + start + dim, v, mask=mask)


@triton.jit
def _quantize_row(x):
    # As integers the bits of |x| sort like the numbers, with inf and nan on top: tl.max alone would drop nan.
    absmax = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=0).to(tl.float32, bitcast=True)
    scale = tl.div_rn(absmax, 127.0)
    code = tl.div_rn(x, tl.zeros_like(x) + tl.where(scale > 0, scale, 1.0))
    code = tl.minimum(tl.maximum(code, -127.0), 127.0)
    return (code + 12582912.0 - 12582912.0).to(tl.int8), scale  # 1.5 * 2^23: the sum rounds half to even


def write_kv_triton(qkv: Tensor, layer: KVLayer, slot_mapping: Tensor, *, num_heads: int) -> None:
    if not len(qkv):
        return
    int8 = layer.k_scale is not None
    scales = (layer.k_scale, layer.v_scale) if int8 else (layer.k, layer.v)  # not read, but a kernel needs pointers
    _write_kv_kernel[(len(qkv), layer.num_kv_heads)](
        qkv, slot_mapping, layer.k, layer.v, *scales, qkv.stride(0), num_heads, layer.num_kv_heads, layer.block_size,
        HEAD_DIM=layer.head_dim, INT8=int8, BLOCK_K=triton.next_power_of_2(layer.head_dim),
    )  # fmt: skip


# ---- registered ops

_WRITE = {"reference": write_kv_reference, "cpu": write_kv_cpu, "triton": write_kv_triton}


def implementation(layer: KVLayer) -> str:
    """What runs on a layer: C++ where the layout is C++'s own, which is where `_cpp.choose` named it."""
    if layer.packed:
        return "cpu"
    chosen = _cpp.choose("paged_attention", layer.k.device.type)
    return "reference" if chosen == "cpu" else chosen


@torch.library.custom_op("lowbit::write_kv", mutates_args=("k", "v", "k_scale", "v_scale"))
def _write_kv(
    qkv: Tensor,
    slot_mapping: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_heads: int,
) -> None:
    layer = KVLayer(k, v, k_scale, v_scale)
    check_qkv(qkv, layer, slot_mapping.shape[0], num_heads)
    _WRITE[implementation(layer)](qkv, layer, slot_mapping, num_heads=num_heads)


@_write_kv.register_fake
def _(qkv, slot_mapping, k, v, k_scale, v_scale, num_heads) -> None:
    return None


# ---- what the rest of the product calls


def write_kv(qkv: Tensor, cache: KVCache, layer: int, slot_mapping: Tensor, *, num_heads: int) -> None:
    """Store the keys and values of a step in the cache.

    qkv           [T, (num_heads + 2 * num_kv_heads) * head_dim] of the cache's compute dtype, rotated, rows contiguous
    slot_mapping  [T] int64, the slot of each row, each at most once; -1: the row is not kept
    raises        ValueError if a shape or dtype does not fit the cache
    """
    kv = cache.layers[layer]
    check_qkv(qkv, kv, slot_mapping.shape[0], num_heads)
    _WRITE[implementation(kv)](qkv, kv, slot_mapping, num_heads=num_heads)
