"""What a device is given: operators that start a kernel, counted on tensors without values, and the largest tensor."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["LargestTensor", "Launches"]

_NOTHING = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view", "detach", "alias"}
_COPIES_STRIDES = {"scatter_add_", "scatter_add", "scatter_", "scatter"}
"""Whose repeatable form on CUDA brings the target's strides from the host, which waits for the device before."""


class LargestTensor(TorchDispatchMode):
    """Elements of the memory of the largest tensor that any operation returned."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for item in out if isinstance(out, tuple | list) else (out,):
            if isinstance(item, Tensor):
                self.elements = max(self.elements, item.untyped_storage().nbytes() // item.element_size())
        return out


class Launches(TorchDispatchMode):
    """Operators of a stretch of code that start at least one kernel: no views, and no memory that is only taken."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    @property
    def count(self) -> int:
        return self.names.total()

    @property
    def waiting(self) -> set[str]:
        """Those at which the host waits for the device."""
        return {"_local_scalar_dense", "nonzero", "item", *_COPIES_STRIDES} & self.names.keys()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        schema = func._schema
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
        name = schema.name.rpartition("::")[2]
        made = func(*args, **(kwargs or {}))
        copied = name in ("to", "contiguous") and made is not args[0]  # else they give what they were given
        if copied or not (is_view or name in _NOTHING):
            self.names[name] += 1
        return made
