"""Shells: tensors that look whole and have no memory of their own, around the part of the whole that this rank holds.

An unmodified model or step may treat a shell as the plain tensor it was on one device. Two nets lie under it.
`__torch_function__` sees every call of torch's public functions: shape, type and device answer as for the whole; what works on
the part alone stays split; anything else is done on the whole, which is a collective. What goes around that net, such as a custom
autograd function, meets `__torch_dispatch__` with the gathered values, and its gradient flows back through the shell.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from hybrid_strategy.errors import ModelError, message

_PROPERTIES = ("shape", "ndim", "dtype", "device", "layout", "itemsize", "nbytes", "requires_grad", "_base", "_version")
_KINDS = ("is_cpu", "is_cuda", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_sparse_csr")
_METHODS = ("size", "dim", "ndimension", "numel", "nelement", "stride", "is_contiguous", "element_size", "get_device", "__len__")
_QUESTIONS = ("numel", "is_floating_point", "is_complex", "is_inference")
METADATA = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in (*_PROPERTIES, *_KINDS)),
        *(getattr(Tensor, name) for name in (*_METHODS, *_QUESTIONS)),
        *(getattr(torch, name) for name in _QUESTIONS),
    ]
)
"""What a shell answers by itself."""

_ASSIGNMENTS = ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__")


class Shell(Tensor):
    """Base of the shells.

    Attributes:
        subject: what it is called in a refusal.
        rule: why it has no memory.
        local: this rank's part.
        whole: the gathered values from the moment they were changed in place.
    """

    subject: ClassVar[str] = "shell"
    rule: ClassVar[str] = ""
    local: Tensor
    whole: Tensor | None

    def __init_subclass__(cls, **options: Any) -> None:
        """Refuses a shell that leaves out an abstract method: the metaclass of tensors does not."""
        super().__init_subclass__(**options)
        asked = [name for name, value in vars(Shell).items() if getattr(value, "__isabstractmethod__", False)]
        if lacking := [name for name in asked if getattr(cls, name) is vars(Shell)[name]]:
            raise TypeError(f"{cls.__name__} lacks {', '.join(lacking)}")

    @classmethod
    def around(cls, local: Tensor, shape: list[int]) -> Tensor:
        """The empty shell of a whole of this shape; for the forward of the autograd function that makes one."""
        return Tensor._make_wrapper_subclass(
            cls, shape, dtype=local.dtype, layout=local.layout, device=local.device, requires_grad=False
        )

    @abstractmethod
    def full_tensor(self) -> Tensor:
        """The whole as a plain tensor, differentiable; a collective."""

    @abstractmethod
    def gathered_values(self) -> Tensor:
        """The values of the whole where autograd has been passed already; a collective."""

    @abstractmethod
    def around_detached(self) -> Tensor:
        """The same shell around the detached part."""

    @abstractmethod
    def on_part(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of `func(self, *args, **kwargs)` with the whole left split, or NotImplemented."""

    def on_second(self, func: Callable[..., Any], first: Any) -> Any:
        """The same of `func(first, self)`, where `first` is no shell."""
        return NotImplemented

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        subject = args[0] if args else kwargs.get("input")
        if isinstance(subject, Shell) and subject.whole is None:
            result = subject.on_part(func, args[1:], {key: each for key, each in kwargs.items() if each is not subject})
            if result is not NotImplemented:
                return result
        elif len(args) == 2 and isinstance(args[1], Shell) and args[1].whole is None and not kwargs:
            result = args[1].on_second(func, args[0])
            if result is not NotImplemented:
                return result
        return _on_whole(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.detach.default:  # how autograd saves a tensor
            shell: Shell = args[0]
            return shell.around_detached()
        if func._schema.is_mutable:
            raise cls.unsupported(str(func))
        return func(*tree_map_only(Shell, _values, args), **tree_map_only(Shell, _values, kwargs or {}))

    @classmethod
    def unsupported(cls, what: str) -> ModelError:
        advice = "Call F.cross_entropy on them, or take `.full_tensor()` first: the whole as a plain tensor"
        return ModelError(message(cls.subject, what, cls.rule, "", advice))


def operation_name(func: Callable[..., Any]) -> str:
    """`cross_entropy`, `__getitem__`; `get_grad` for the getter of the property `grad`."""
    owner = getattr(func, "__self__", None)  # of a property's getter: the property
    return f"get_{getattr(owner, '__name__', '')}" if func.__name__ == "__get__" else func.__name__


def _values(shell: Shell) -> Tensor:
    return shell.whole.detach() if shell.whole is not None else shell.gathered_values()


def whole_of(shell: Shell) -> Tensor:
    """The whole as a plain tensor, differentiable."""
    return shell.full_tensor() if shell.whole is None else shell.whole


def _on_whole(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs `func` on the gathered values; from a change in place on, a shell is what it made of them."""
    name = func.__name__
    if name in ("data_ptr", "untyped_storage", "__dlpack__", "__cuda_array_interface__"):
        raise next(type(each) for each in (*args, *kwargs.values()) if isinstance(each, Shell)).unsupported(name)
    whole_args, whole_kwargs = tree_map_only(Shell, whole_of, (args, kwargs))
    result = func(*whole_args, **whole_kwargs)
    if _in_place(name) and isinstance(args[0], Shell):
        args[0].whole = whole_args[0]
        return args[0] if result is whole_args[0] else result
    return result


def _in_place(name: str) -> bool:
    return (name.endswith("_") and not name.endswith("__")) or name in _ASSIGNMENTS
