"""The linear layers as the engine serves them: repacked, fused where they share an input, and quantized on request.

The parameters stay where they are, under their own names: weight versions are written into them.
What is computed with is derived from them by ``refresh``, which the engine calls after every new
version.

    q_proj, k_proj, v_proj ──┐ one product; the first of them called with an input computes it,
    gate_proj, up_proj ──────┘ the others take their slice of the result

==========  ======  ===================================================================================================
``none``    CPU     oneDNN product with packed weights (MKL's is less than half as fast on AMD processors); where oneDNN
                    packs none of this type (bfloat16 without AVX-512, float16 on most processors), torch's own
``int8``    CPU     int8 weights, one scale an output channel; int8 activations, one scale a token, so that a row's result
                    does not depend on the rest of the batch; oneDNN product. Without VNNI instructions that product
                    adds pairs in 16 bits, which saturate: the same codes are then multiplied in float32
``fp8``     CUDA    e4m3 weights and activations, one scale a row each, ``torch._scaled_mm``; slower than bfloat16 on an H200
                    while its rounding was eight kernels a product, which the compiler has fused since
==========  ======  ===================================================================================================
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llamarl.engine.ranks import EngineRanks
from llamarl.settings.engine import ENGINES

__all__ = ["FusedLinear", "serve_linears", "supported_quantizations"]

_FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
_FP8_MULTIPLE = 16
_U8_ZERO = 128  # oneDNN multiplies unsigned activations by signed weights
_LARGEST_CODE = 127


def supported_quantizations(device: torch.device) -> tuple[str, ...]:
    """What ``generator.quantization`` may be on ``device`` as it is: fp8 needs compute capability
    8.9 (Ada, Hopper, later), and no card of AMD's, which has it but where MI300 reads the same codes as
    other numbers (e4m3fnuz)."""
    offered = ("none", *ENGINES["native"].quantizations.get(device.type, ()))
    if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 9)):
        return tuple(kind for kind in offered if kind != "fp8")
    return offered


class FusedLinear(nn.Module):
    """Linear layers of one input as one product.

    Args:
        summed: Of tensor-parallel ranks: each rank's product is a part of a sum.
    """

    packs = False
    """Whether ``refresh`` makes a copy of its own, so that the parameters are only read while it runs."""
    _packed: Tensor | None = None

    def __init__(self, sources: Sequence[nn.Linear], *, summed: EngineRanks | None = None) -> None:
        super().__init__()
        self._weights: list[Tensor] = [source.weight for source in sources]
        self._biases: list[Tensor | None] = [source.bias for source in sources]
        self.in_features = sources[0].in_features
        self._summed = summed
        if summed is not None and not summed.is_leader:
            self._biases = [None] * len(sources)  # a bias is added once
        self.sizes = [len(weight) for weight in self._weights]
        self.out_features = sum(self.sizes)
        self._bias: Tensor | None = None
        self._input: Tensor | None = None
        self._output: Tensor = torch.empty(0)
        self._num_untaken = 0

    def __setattr__(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # sources stay parameters of the model, not of this module

    def refresh(self) -> None:
        """Derive the served form from the parameters as they are now."""
        if any(bias is not None for bias in self._biases):
            zeros = [self._weights[0].new_zeros(size) for size in self.sizes]
            bias = torch.cat([zero if b is None else b for zero, b in zip(zeros, self._biases, strict=True)])
            self._bias = _overwrite(self._bias, bias.detach())
        self.forget()
        self._pack(self._weight().detach())

    def _weight(self) -> Tensor:
        return self._weights[0] if len(self._weights) == 1 else torch.cat(self._weights)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the tensors lie that are computed with, as far as they are tensors."""
        served = (self._bias, *(getattr(self, name, None) for name in ("_served", "_packed", "_scale")))
        return tuple(0 if tensor is None or tensor.is_mkldnn else tensor.data_ptr() for tensor in served)

    @property
    def follows_parameters(self) -> bool:
        """Whether ``refresh`` sees parameters whose storage was exchanged: it reads the parameters,
        not views of them."""
        return self.packs and all(isinstance(weight, nn.Parameter) for weight in self._weights)

    def forget(self) -> None:
        """Let go of the last input and output, which ``part`` keeps for the layers that share them."""
        self._input, self._output = None, torch.empty(0)

    def drop_served(self) -> int:
        """Free the served form and what the last product left, until the next ``refresh``; returns
        the served form's bytes."""
        self.forget()
        packed, self._packed = self._packed, None
        return 0 if packed is None else packed.numel() * packed.element_size()

    def part(self, x: Tensor, first: int, size: int) -> Tensor:
        """Output features ``first .. first + size`` for ``x``; the product is computed once per
        input tensor, and let go of when all parts have been taken: a step would otherwise end with
        those of every layer."""
        if self._input is not x:
            self._output = self(x)
            self._input = x  # held, so that no other tensor can take its identity
            self._num_untaken = len(self.sizes)
        part = self._output.narrow(-1, first, size)
        self._num_untaken -= 1
        if not self._num_untaken:
            self.forget()
        return part

    def forward(self, x: Tensor) -> Tensor:
        out = self.product(x)
        return out if self._summed is None else self._summed.sum(out)

    def _pack(self, weight: Tensor) -> None:
        raise NotImplementedError

    def product(self, x: Tensor) -> Tensor:
        """[..., in_features] to [..., out_features]."""
        raise NotImplementedError


class _PlainLinear(FusedLinear):
    """The library's product. Fused parameters become views of one tensor, so there is no second copy to refresh."""

    _served: Tensor | None = None

    def _weight(self) -> Tensor:
        if self._served is None:
            self._served = super()._weight().detach()
            if len(self._weights) > 1:
                for parameter, part in zip(self._weights, self._served.split(self.sizes), strict=True):
                    parameter.data = part
        return self._served

    def _pack(self, weight: Tensor) -> None:
        pass

    def product(self, x: Tensor) -> Tensor:
        assert self._served is not None
        return F.linear(x, self._served, self._bias)


class _OneDnnLinear(FusedLinear):
    packs = True

    def _pack(self, weight: Tensor) -> None:
        self._packed = None  # its memory first: the new one has the same size
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


class _Int8Linear(FusedLinear):
    packs = True

    def _pack(self, weight: Tensor) -> None:
        self._scale = (weight.abs().amax(dim=1).float() / _LARGEST_CODE).clamp_(min=1e-12)
        codes = (weight / self._scale[:, None]).round_()
        if _has_exact_int8():
            self._packed = _pack_int8(codes.to(torch.int8))
        else:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(codes.float().contiguous())

    def product(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features).float()
        scale = rows.abs().amax(dim=1, keepdim=True).div_(_LARGEST_CODE).clamp_(min=1e-12)
        # adding 128.5 and cutting off rounds to nearest; a NaN row keeps a NaN scale, and with it a NaN result
        quantized = (rows / scale).add_(_U8_ZERO + 0.5).to(torch.uint8)
        assert self._packed is not None
        if _has_exact_int8():
            out = _int8_product(quantized, self._packed, self._scale)
        else:  # sums of these codes are whole numbers, which float32 holds up to 2**24
            codes = quantized.float().sub_(_U8_ZERO)
            out = torch.ops.mkldnn._linear_pointwise(codes, self._packed, None, "none", [], "").mul_(self._scale)
        out.mul_(scale)
        if self._bias is not None:
            out.add_(self._bias)
        return out.view(*x.shape[:-1], self.out_features).to(x.dtype)


def _pack_int8(codes: Tensor) -> Tensor:
    """[N, K] int8 in the layout that ``_int8_product`` reads."""
    return torch.ops.onednn.qlinear_prepack(codes, None)


def _int8_product(rows: Tensor, packed: Tensor, scale: Tensor) -> Tensor:
    """[T, N] float32: rows [T, K] of uint8 around 128, times N packed rows of int8 weights with a scale each."""
    zero = torch.zeros(len(scale), dtype=torch.int32)
    return torch.ops.onednn.qlinear_pointwise(
        rows, 1.0, _U8_ZERO, packed, scale, zero, None, 1.0, 0, torch.float32, "none", [], ""
    )


@cache
def _has_exact_int8() -> bool:
    """Whether int8 products are exact here for the largest codes. The product itself is asked: what it does follows
    the processor and ``ONEDNN_MAX_CPU_ISA``."""
    K, N = 64, 16
    packed = _pack_int8(torch.full((N, K), _LARGEST_CODE, dtype=torch.int8))
    found = _int8_product(torch.full((2, K), 255, dtype=torch.uint8), packed, torch.ones(N))
    return bool((found == K * (255 - _U8_ZERO) * _LARGEST_CODE).all())


@cache
def _packs(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this type here."""
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype))
    except RuntimeError:  # it has no instructions for this type
        return False
    return True


class _Fp8Linear(FusedLinear):
    """The kernel wants both sizes of the weight to be multiples of 16: zeros fill them up."""

    packs = True
    _scale: Tensor | None = None

    def _pack(self, weight: Tensor) -> None:
        packed, scale = _rows_to_fp8(_filled_up(weight, rows=True))
        self._packed, self._scale = _overwrite(self._packed, packed), _overwrite(self._scale, scale)

    def product(self, x: Tensor) -> Tensor:
        assert self._packed is not None and self._scale is not None
        codes, scale = _rows_to_fp8(_filled_up(x.reshape(-1, self.in_features)))
        out = torch._scaled_mm(
            codes,
            self._packed.t(),
            scale_a=scale,
            scale_b=self._scale.t(),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,  # as serving engines do: else the tensor cores run at half their rate
        )
        out = out[:, : self.out_features].to(x.dtype)
        if self._bias is not None:
            out = out + self._bias
        return out.reshape(*x.shape[:-1], self.out_features)


def _overwrite(old: Tensor | None, new: Tensor) -> Tensor:
    """``new`` at the address of ``old``: a CUDA graph that reads it stays valid."""
    return new if old is None else old.copy_(new)


def _filled_up(x: Tensor, *, rows: bool = False) -> Tensor:
    """[N, K] with columns (and ``rows``) of zeros up to the next size that the fp8 product takes."""
    missing = (-x.shape[1] % _FP8_MULTIPLE, -x.shape[0] % _FP8_MULTIPLE if rows else 0)
    return F.pad(x, (0, missing[0], 0, missing[1])) if any(missing) else x


def _rows_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K] as e4m3, and the scale of each row, [N, 1] fp32."""
    # in float32 beforehand: compiled, ``dtype=`` would round the peak of some kernels and not of others
    peak = torch.linalg.vector_norm(x.float(), torch.inf, dim=1, keepdim=True)
    scale = (peak / torch.finfo(torch.float8_e4m3fn).max).clamp_(min=1e-12)
    return (x / scale).to(torch.float8_e4m3fn), scale


class _Part(nn.Module):
    """One of the fused layers, in its old place in the model."""

    _fused: FusedLinear

    def __init__(self, fused: FusedLinear, first: int, size: int) -> None:
        super().__init__()
        object.__setattr__(self, "_fused", fused)
        self._first, self._size = first, size

    def forward(self, x: Tensor) -> Tensor:
        return self._fused.part(x, self._first, self._size)


def serve_linears(
    model: nn.Module,
    *,
    quantization: str,
    device: torch.device,
    ranks: EngineRanks | None = None,
    summed: Collection[str] = (),
) -> list[FusedLinear]:
    """Replace the model's linear layers by served ones; returns those, for ``refresh``.

    Take ``named_parameters`` before: the replaced modules no longer show up in the model.

    Args:
        ranks: Of a model whose layers are cut over tensor-parallel ranks.
        summed: Names of the layers whose products are parts of a sum over these ranks.
    """
    ranks = ranks or EngineRanks()
    kinds: dict[str, type[FusedLinear]] = {"int8": _Int8Linear, "fp8": _Fp8Linear}
    served: list[FusedLinear] = []
    for path, parent in list(model.named_modules()):
        for names in (*_FUSED, *((name,) for name, _ in list(parent.named_children()))):
            sources = [getattr(parent, name, None) for name in names]
            linears = [source for source in sources if type(source) is nn.Linear]
            if len(linears) < len(names):
                continue
            plain = _OneDnnLinear if device.type == "cpu" and _packs(linears[0].weight.dtype) else _PlainLinear
            kind = plain if quantization == "none" else kinds[quantization]
            if len(names) == 1 and f"{path}.{names[0]}" in summed:
                fused = kind(linears, summed=ranks)
            else:
                fused = kind(linears)
            fused.refresh()
            served.append(fused)
            first = 0
            for name, size in zip(names, fused.sizes, strict=True):
                setattr(parent, name, fused if len(names) == 1 else _Part(fused, first, size))
                first += size
    return served
