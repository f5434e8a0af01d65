"""`MethodHook`: stands for a method of one model, and leaves no trace when it is removed.

When: `attach` needs calls of ``generate``, and what ``generate`` prepares for each step. The hook is an attribute of
the one model; its class, and transformers, stay as they are.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from types import MethodType
from typing import Any, ClassVar, Self

from transformers import PreTrainedModel

from ...errors import CacheError
from .implementation import restore_in_copy

#: Held while hooks are installed and removed.
LOCK = threading.RLock()


class MethodHook:
    """Replaces the method `name` of one model from `install` to `remove`.

    Parameters
    ----------
    model : PreTrainedModel
        The model.
    """

    #: Which method; set by subclasses.
    name: ClassVar[str]

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._found = model, vars(model).get(self.name)
        self._plain: Callable[..., Any] = getattr(model, self.name)
        # Not the plain method's own attributes: where other code has wrapped a hook, they are that hook's.
        functools.update_wrapper(self, self._plain, updated=())

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        """Return the model's hook, or a new one, which is to be installed."""
        found = vars(model).get(cls.name)
        return found if isinstance(found, cls) else cls(model)

    def install(self) -> None:
        """Replace the method; again is the same as once."""
        setattr(self._model, self.name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def remove(self) -> None:
        """Restore the original, unless other code has wrapped the hook meanwhile."""
        if vars(self._model).get(self.name) is self:
            if self._found is None:
                delattr(self._model, self.name)
            else:
                setattr(self._model, self.name, self._found)

    def __deepcopy__(self, copies: dict[int, Any]) -> Any:
        """Copy the model without the hook: its own method, and its attention from before the blocks."""
        restore_in_copy(copies)
        if self._found is not None:
            return copy.deepcopy(self._found, copies)
        model = copies.get(id(self._model))
        return self._plain if model is None else MethodType(getattr(type(model), self.name), model)

    def __reduce__(self) -> Any:
        raise CacheError("the model is inside a block of attach(); leave the block before you pickle the model")
