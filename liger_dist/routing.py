"""Routing replay: the experts that another run has chosen, with the scores of this model (R3, arXiv:2510.11370).

A router scores all experts of a token and takes the best ones, by ``torch.topk``. What it does with their numbers
afterwards is code of the model: scores of softmax or sigmoid, normalised or scaled. So only the result of its last
``topk`` is exchanged. Each router is tried when it is called for the first time, with made-up inputs and the weights of
its layer: it must return exactly the experts that it was given, each with its score, whatever it would choose itself.

A router that chooses among groups first computes no scores of the experts of other groups. In a replay all groups are
allowed.

Legend: L routers in the order of their layers, T = B * S tokens of this rank, k experts of a token, E experts.
"""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from inspect import signature
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from liger_dist.errors import LigerDistError
from liger_dist.losses.collectives import require
from liger_dist.model.documents import moved, shape_of
from liger_dist.model.four_bit_experts import is_experts
from liger_dist.model.structure import full_shape
from liger_dist.model.torch_modes import checkpoint_frames, in_backward, uncompiled, without_dispatch_modes

_TOKENS = 32
"""of a trial, whatever the number of a call: fewer might all have experts of groups that their router allows"""
_SMALL = 1 / 32
"""values of a trial, so that the softmax of large weights has no zeros, also in fp16"""
_BY_TOKENS = -1
_WRAPPERS = re.compile(
    r"^((module|_fsdp_wrapped_module|_orig_mod)\.)+"
    r"|\b(_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|base_model\.model|original_module"
    r"|modules_to_save\.\w+)\."
)
"""of names of modules: those of DDP, engines, FSDP1, checkpointing, compiling and PEFT"""


@dataclass
class Routes:
    """Experts that the routers of a model have chosen in one forward."""

    experts: dict[str, Tensor] = field(default_factory=dict)
    """by router: int64 ``[T, k]``, tokens in the order of ``input_ids.flatten()``"""

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the routers in the model."""
        return tuple(self.experts)

    @property
    def indices(self) -> Tensor:
        """Experts of all routers, int64 ``[L, T, k]``."""
        return torch.stack(list(self.experts.values()))


@contextmanager
def record_routing(model: nn.Module) -> Iterator[Routes]:
    """Records the experts of one forward of ``model``, for :func:`replay_routing`.

    Returns:
        Routes, complete after the forward. Recomputed layers of activation checkpointing are not recorded again.

    Raises:
        LigerDistError: the model has no experts, a router is not understood (named, with the reason), or the model is
            called twice.
    """
    routes = Routes()
    with _Pass(model, None, routes).running():
        yield routes


@contextmanager
def replay_routing(model: nn.Module, routes: Routes | Tensor) -> Iterator[None]:
    """Lets the routers of ``model`` take given experts; their scores, and the gradients of these, are the model's.

    Each forward within the context takes the same routes: use one context for each micro-batch. A backward after the
    context recomputes checkpointed layers with the same experts. Compiled layers run their original
    code within it, uncompiled. A load-balancing loss remains that of the router's scores.

    Args:
        routes: what :func:`record_routing` returned, or indices of an inference engine: integers ``[L, T, k]``, where L
            is the number of routers, or that of all decoder layers (entries of layers without experts are not read).
            Tokens are in the order of ``input_ids.flatten()`` of this rank. A token with -1 keeps its choice, as
            the last one of a text, for which engines return nothing.

    Raises:
        LigerDistError: shapes, tokens or experts do not fit the model, a token has an expert twice, a router is not
            understood (named, with the reason), or the context ends and some routes have not been used.
    """
    with _Pass(model, routes, None).running() as running:
        yield
    unused = [name for name in running.chosen if name not in running.calls]
    if unused:
        raise LigerDistError(
            f"routes of {len(unused)} of {len(running.chosen)} routers, {unused[0]} the first, were not used in "
            "replay_routing; call the model, with all layers, within it."
        )


class _Pass:
    """Recording or replay of one forward of a model, and of what is recomputed of it."""

    def __init__(self, model: nn.Module, given: Routes | Tensor | None, routes: Routes | None) -> None:
        self.model, self.routes = model, routes
        self.routers = _routers_of(model)
        self.calls: Counter[str] = Counter()
        self.forwards = 0
        """of the model; 0 if modules inside are called instead"""
        self.chosen: dict[str, Tensor] = (
            {} if given is None else _by_router(model, list(dict.fromkeys(self.routers.values())), given)
        )

    @contextmanager
    def running(self) -> Iterator[_Pass]:
        """Within, the routers of the model record or replay. In the context of another pass, that one continues
        afterwards: a backward may recompute layers of an earlier micro-batch."""
        with ExitStack() as stack:
            # The forward of a compiled layer would not see that a router has another one.
            stack.enter_context(uncompiled())
            if not in_backward():
                hook = self.model.register_forward_pre_hook(self._before_forward, with_kwargs=True, prepend=True)
                stack.callback(hook.remove)
            for router, name in self.routers.items():
                stack.enter_context(_exchanged(router, _Choice(self, name, router)))
            yield self

    def _before_forward(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Checks the number of tokens, before anything is computed or unsharded."""
        if in_backward():
            return  # A checkpoint of the whole model, of another pass.
        self.forwards += 1
        shape = shape_of(dict(zip(signature(model.forward).parameters, args, strict=False)) | kwargs)
        for name, experts in self.chosen.items():
            if shape is not None and shape[0] * shape[1] != len(experts) and not _is_of_images(name):
                raise LigerDistError(
                    f"routes of {len(experts)} tokens for {name} are replayed in a call of {shape[0]} x {shape[1]} "
                    "tokens; expected experts of each token, -1 for tokens whose experts are not known."
                )


def _is_of_images(name: str) -> bool:
    return any(word in name for word in ("vision", "visual", "image"))


class _Choice:
    """Forward of a router within a pass."""

    def __init__(self, of_pass: _Pass, name: str, router: nn.Module) -> None:
        self.of_pass, self.name, self.router = of_pass, name, router

    def __reduce__(self) -> Any:
        raise LigerDistError(
            "the model was copied or pickled within record_routing or replay_routing, whose routes the copy would "
            "keep; copy it before or afterwards."
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        running, forward = self.of_pass, _forward_of(self.router)
        explained = _explain(self.name, self.router, forward, args, kwargs)
        given = running.chosen.get(self.name)
        is_recomputed = in_backward()
        # Also in a recomputation: of a checkpoint within another one.
        _replay_when_recomputed(running)
        with _LastTopK(explained, given, self.name) as chosen:
            output = forward(*args, **kwargs)
        experts = _numbers_in(output) if explained.last == _BY_TOKENS else chosen.experts
        if experts is None or chosen.count != explained.last + 1:
            raise LigerDistError(
                f"the router {self.name} has chosen experts {chosen.count} times in a call, and {explained.last + 1} "
                "times when it was tried, in evaluation. Train this model without routing replay."
            )
        if is_recomputed:
            return output
        running.calls[self.name] += 1
        if running.forwards and running.calls[self.name] > running.forwards:
            raise LigerDistError(
                f"the router {self.name} was called twice in a forward: layers share it, or run several times. "
                "Train this model without routing replay."
            )
        if running.routes is not None:
            if self.name in running.routes.experts:
                raise LigerDistError(
                    f"the router {self.name} was called twice within record_routing; expected one forward. Use one "
                    "context for each."
                )
            experts = experts.detach()
            running.routes.experts[self.name] = experts.reshape(-1, experts.shape[-1]).long()
        return output


@dataclass(frozen=True)
class _Explained:
    """How a router chooses its experts."""

    code: tuple[Any, list[Any]]
    """forward and settings of the router when it was tried"""
    last: int
    """number of the ``topk`` that chooses them; :data:`_BY_TOKENS` for a table of tokens, which no replay changes"""
    groups: int | None
    """number of the ``topk`` that chooses groups of them, all of which a replay allows"""


_EXPLAINED: weakref.WeakKeyDictionary[nn.Module, _Explained] = weakref.WeakKeyDictionary()
"""routers that have been tried"""


class _LastTopK(TorchFunctionMode):
    """Replaces the result of a router's last ``topk``.

    Args:
        given: experts ``[T, k]``, -1 for the router's choice; None to look at what is chosen.
    """

    def __init__(self, explained: _Explained, given: Tensor | None, name: str) -> None:
        super().__init__()
        self.explained, self.given, self.name = explained, given, name
        self.count = 0
        self.experts: Tensor | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.topk and func is not Tensor.topk:
            return func(*args, **kwargs)
        number, self.count = self.count, self.count + 1
        named = dict(zip(("input", "k", "dim"), args, strict=False)) | kwargs
        scores = named.pop("input")
        found = torch.topk(scores, **named)
        if self.given is not None and self.given.device != scores.device:
            self.given = moved(self.given, scores.device)
        if number == self.explained.groups and self.given is not None:
            return self._all_groups(scores, found.indices)
        if number != self.explained.last:
            return found
        if self.given is None:
            self.experts = found.indices
            return found
        self.experts = experts = self._experts_for(scores, found.indices)
        return torch.return_types.topk((scores.gather(-1, experts), experts))

    def _all_groups(self, scores: Tensor, picks: Tensor) -> Any:
        """Selects all groups for tokens whose experts are given; the same number of entries for the rest, some
        twice."""
        assert self.given is not None
        is_known = (self.given[:, :1] >= 0).reshape(*picks.shape[:-1], 1)
        more = picks[..., :1].expand(*picks.shape[:-1], scores.shape[-1] - picks.shape[-1])
        every = torch.arange(scores.shape[-1], device=picks.device)
        groups = torch.where(is_known, every, torch.cat([picks, more], -1))
        return torch.return_types.topk((scores.gather(-1, groups), groups))

    def _experts_for(self, scores: Tensor, picks: Tensor) -> Tensor:
        assert self.given is not None
        if picks.numel() != self.given.numel() or picks.shape[-1] != self.given.shape[-1]:
            raise LigerDistError(
                f"routes of shape {list(self.given.shape)} for {self.name}, which chooses {picks.shape[-1]} experts of "
                f"each of {picks.numel() // picks.shape[-1]} tokens; expected [{picks.numel() // picks.shape[-1]}, "
                f"{picks.shape[-1]}]."
            )
        given = self.given.reshape(picks.shape)
        require(
            (given < scores.shape[-1]).all(),
            f"routes name an expert that a router does not have; expected numbers below {scores.shape[-1]}",
            lambda: f"{self.name} got {int(given.max())}.",
        )
        return torch.where(given < 0, picks, given)


def _explain(
    name: str, router: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> _Explained:
    """Tries how a router chooses experts, with inputs that are the same on all ranks.

    Raises:
        LigerDistError: it does not return the experts that it is given with their scores.
    """
    code = type(router).forward, _settings_of(router)
    known = _EXPLAINED.get(router)
    if known is not None and known.code == code:
        return known
    states = {key: value.clone() for key, value in router.named_buffers()}
    modes = [(module, module.training) for module in router.modules()]
    try:
        router.eval()
        with torch.no_grad(), without_dispatch_modes(), _without_adapters(router):
            found = _Trial(forward, code, *_made_up(args, kwargs)).explanation()
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for key, value in router.named_buffers():
                value.copy_(states[key])
    if isinstance(found, str):
        raise LigerDistError(
            f"the experts of {name} ({type(router).__name__}) can be neither recorded nor replayed: {found}. Train "
            "this model without routing replay."
        )
    _EXPLAINED[router] = found
    return found


def _settings_of(router: nn.Module) -> list[Any]:
    """Returns numbers, strings and flags of a router and its config, which its forward may read."""
    held = (vars(module) for module in router.modules())
    holders = (holder for one in held for holder in (one, getattr(one.get("config"), "__dict__", {})))
    return [
        (name, value)
        for holder in holders
        for name, value in holder.items()
        if isinstance(value, bool | int | float | str) and name != "training" and not name.startswith(("_", "ds_"))
    ]


@contextmanager
def _without_adapters(router: nn.Module) -> Iterator[None]:
    """Gives a router its original weights instead of those that PEFT computes in its call, once for all that read
    them."""
    if not is_parametrized(router):
        yield
        return
    adapted: Any = type(router)
    originals = {name: part.original for name, part in router.parametrizations.items()}  # type: ignore[union-attr,operator]
    router.__class__ = adapted.__bases__[0]
    router._parameters.update(originals)
    try:
        yield
    finally:
        for name in originals:
            del router._parameters[name]
        router.__class__ = adapted


def _made_up(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns arguments of a few tokens with other values, where the tokens of a call stand in front."""
    generator = torch.Generator().manual_seed(0)
    first = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
    tokens = first.shape[:-1]
    in_rows = (1, _TOKENS) if len(tokens) == 2 else (_TOKENS,)

    def made_up(value: Any) -> Any:
        if isinstance(value, Tensor) and value.shape[:-1] == tokens and value.is_floating_point():
            values = torch.randn(*in_rows, value.shape[-1], generator=generator, device="cpu") * _SMALL
            return values.to(value.device, value.dtype)
        if isinstance(value, Tensor) and value.numel() == tokens.numel() and not value.is_floating_point():
            # Ids of the tokens.
            return torch.cat([value.flatten()[:_TOKENS], value.new_zeros(_TOKENS)])[:_TOKENS].view(in_rows)
        return value

    return tuple(map(made_up, args)), {key: made_up(value) for key, value in kwargs.items()}


class _Trial:
    """Calls of a router with experts that it would not choose."""

    def __init__(self, forward: Callable[..., Any], code: Any, args: tuple[Any, ...], kwargs: dict[str, Any]):
        self.forward, self.code, self.args, self.kwargs = forward, code, args, kwargs

    def explanation(self) -> _Explained | str:
        """Returns how the router chooses, or a clause that says why it is not understood."""
        looking = _Looking()
        with looking:
            output = self.forward(*self.args, **self.kwargs)
        if not looking.found:
            turned = tuple(-value if _is_floating(value) else value for value in self.args)
            numbers, again = _numbers_in(output), _numbers_in(self.forward(*turned, **self.kwargs))
            if numbers is not None and again is not None and torch.equal(numbers, again):
                return _Explained(self.code, _BY_TOKENS, None)
            return "it does not choose them by torch.topk"
        scores, experts = looking.found[-1]
        if _scores_in(output, experts) is None:
            return "it does not return the result of its last topk with a score of each expert"
        generator = torch.Generator().manual_seed(1)
        order = torch.rand(scores.shape, generator=generator, device="cpu").argsort(-1)[..., : experts.shape[-1]]
        permuted = order.to(experts.device).view(-1, experts.shape[-1])
        last, objections = len(looking.found) - 1, []
        for groups in (None, *reversed(range(last))):
            explained = _Explained(self.code, last, groups)
            objections.append(self._objection(explained, output, experts, permuted))
            if not objections[-1]:
                return explained
        return objections[0]

    def _objection(self, explained: _Explained, output: Any, experts: Tensor, permuted: Tensor) -> str:
        flat = experts.reshape(permuted.shape)
        again = self._run(explained, flat)
        if again is None or not _same(again, output):
            return "it computes something else when it is given the experts that it has chosen"
        replaced, turned = self._run(explained, permuted), self._run(explained, permuted.flip(-1))
        mixed = self._run(explained, torch.cat([permuted[:1], torch.full_like(flat[1:], -1)]))
        if replaced is None or turned is None or mixed is None:
            return "it does not run with other experts"
        scores, of_turned = (
            _scores_in(out, chosen.view(experts.shape))
            for out, chosen in ((replaced, permuted), (turned, permuted.flip(-1)))
        )
        of_mixed = _scores_in(mixed, torch.cat([permuted[:1], flat[1:]]).view(experts.shape))
        of_own = _scores_in(output, experts)
        if scores is None or of_turned is None or of_mixed is None or of_own is None:
            return "it does not return the experts that it is given"
        if not bool(torch.isfinite(scores).all()) or bool((scores == 0).any()):
            return "experts that it would not choose have no score"
        tolerance = 1e-4 if scores.dtype in (torch.float32, torch.float64) else 3e-2
        is_same = torch.allclose(of_turned.flip(-1).float(), scores.float(), rtol=tolerance, atol=0)
        k = experts.shape[-1]
        rows, of_rows = of_mixed.reshape(-1, k)[1:], of_own.reshape(-1, k)[1:]
        if not is_same or not torch.equal(rows, of_rows):
            return "the score of an expert depends on its place, or on other tokens"
        return ""

    def _run(self, explained: _Explained, given: Tensor) -> Any:
        try:
            with _LastTopK(explained, given, "a trial"):
                return self.forward(*self.args, **self.kwargs)
        except (RuntimeError, IndexError, ValueError):
            # Code that does not run with these experts is not understood; the caller says so.
            return None


class _Looking(TorchFunctionMode):
    """Notes scores and results of each ``topk``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.topk or func is Tensor.topk:
            self.found.append((args[0] if args else (kwargs or {})["input"], result.indices))
        return result


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _numbers_in(output: Any) -> Tensor | None:
    """Returns the only tensor of integers among the outputs of a router."""
    found = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and not leaf.is_floating_point()]
    return found[0] if len(found) == 1 else None


def _scores_in(output: Any, experts: Tensor) -> Tensor | None:
    """Returns the scores of ``experts`` ``[..., k]`` among the outputs of a router: beside their numbers, or in their
    places of all experts ``[T, E]``, with zeros elsewhere; None if neither is there."""
    tensors = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    as_many = [t.reshape(experts.shape) for t in tensors if t.numel() == experts.numel()]
    for place, numbers in enumerate(as_many):
        if not numbers.is_floating_point() and torch.equal(numbers.long(), experts):
            # Beside it, in the order of (logits, scores, experts).
            beside = [t for t in (*reversed(as_many[:place]), *as_many[place + 1 :]) if t.is_floating_point()]
            return beside[0] if beside else None
    for dense in (t for t in tensors if t.is_floating_point() and t.shape[:-1] == experts.shape[:-1]):
        if torch.equal(dense != 0, torch.zeros_like(dense, dtype=torch.bool).scatter(-1, experts, True)):
            return dense.gather(-1, experts)
    return None


def _same(one: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor))


_FOUND: weakref.WeakKeyDictionary[nn.Module, tuple[list[Any], list[tuple[Any, str]]]] = weakref.WeakKeyDictionary()
"""modules that a model had, and its routers with their names; weak references"""


def _routers_of(model: nn.Module) -> dict[nn.Module, str]:
    """Returns the modules that choose experts and their names, in the order of their layers; finds them again where a
    module of the model is another one than before. PEFT keeps two of one name."""
    modules = list(model.modules())
    seen, found = _FOUND.get(model, ([], []))
    if len(seen) != len(modules) or any(ref() is not module for ref, module in zip(seen, modules, strict=True)):
        found = [(weakref.ref(router), name) for router, name in _find_routers(model).items()]
        _FOUND[model] = [weakref.ref(module) for module in modules], found
    return {router(): name for router, name in found}


def _find_routers(model: nn.Module) -> dict[nn.Module, str]:
    """Finds the modules that choose experts.

    Raises:
        LigerDistError: there are none, or a module of experts has no router beside it.
    """
    parents = {child: parent for parent in model.modules() for child in parent.children()}
    names = {module: _WRAPPERS.sub("", f"{name}.").removesuffix(".") for name, module in model.named_modules()}
    found: dict[nn.Module, str] = {}
    for experts in (module for module in names if module in parents and _has_experts(module)):
        routers = _beside(experts, parents)
        if not is_experts(experts) and not (routers and _is_in_a_layer(experts, parents)):
            continue  # Other parameters of three dimensions.
        if len({names[router] for router in routers}) != 1:
            found_as = f"{len(routers)} modules" if routers else "no module"
            raise LigerDistError(
                f"{found_as} beside the experts {names[experts]} calls torch.topk; expected one router. Train this "
                "model without routing replay."
            )
        found.update((router, names[router]) for router in routers)
    if not found:
        raise LigerDistError(
            f"{type(model).__name__} has no experts whose routing could be recorded or replayed; call it without "
            "record_routing and replay_routing."
        )
    return found


def _is_in_a_layer(module: nn.Module, parents: dict[nn.Module, nn.Module]) -> bool:
    while module in parents and not isinstance(module, nn.ModuleList):
        module = parents[module]
    return isinstance(module, nn.ModuleList)


def _beside(experts: nn.Module, parents: dict[nn.Module, nn.Module]) -> list[nn.Module]:
    """Returns the modules that choose experts, around these ones: in the closest module that has any, up to the layer
    for those of transformers."""
    block, inside = parents[experts], set(experts.modules())
    by_tokens: list[nn.Module] = []
    while True:
        around = [module for module in block.modules() if module not in inside]
        routers = [module for module in around if _selects(module)]
        beside = [module for module in around if module is not block]
        by_tokens = by_tokens or [one for one in beside if "input_ids" in signature(one.forward).parameters]
        is_layer = block not in parents or isinstance(parents[block], nn.ModuleList)
        if routers or is_layer or not is_experts(experts):
            return routers or by_tokens
        block = parents[block]


def _has_experts(module: nn.Module) -> bool:
    """True for a module that holds the weights of several experts: transformers' modules of experts, or modules with
    parameters of three dimensions, but for convolutions."""
    if is_experts(module):
        return True
    parameters = [p for p in module._parameters.values() if p is not None]
    return not isinstance(module, nn.modules.conv._ConvNd) and sum(len(full_shape(p)) == 3 for p in parameters) > 0


def _selects(module: nn.Module) -> bool:
    """True if the code of a module's class calls ``topk``."""
    functions = (value for cls in type(module).__mro__ if cls is not nn.Module for value in vars(cls).values())
    return any("topk" in _names_in(f.__code__) for f in functions if isinstance(f, FunctionType))


def _names_in(code: CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return set(code.co_names).union(*map(_names_in, inner))


def _by_router(model: nn.Module, names: Sequence[str], given: Routes | Tensor) -> dict[str, Tensor]:
    """Returns the experts of each router.

    Raises:
        LigerDistError: they do not fit the model.
    """
    if isinstance(given, Routes):
        if set(given.layers) != set(names):
            missing = sorted(set(names) ^ set(given.layers))
            raise LigerDistError(
                f"routes of {len(given.layers)} routers for {len(names)} of {type(model).__name__}; {missing[0]} is "
                "only in one of them. Record and replay the same model."
            )
        for name, experts in given.experts.items():
            if experts.dim() != 2 or experts.is_floating_point():
                raise LigerDistError(
                    f"routes for {name} are {experts.dtype} {list(experts.shape)}; expected integers [tokens, experts]."
                )
        return {name: experts.long() for name, experts in given.experts.items()}
    chosen = _by_layer(model, names, given)
    _check_experts(torch.cat(list(chosen.values())))
    return chosen


def _by_layer(model: nn.Module, names: Sequence[str], given: Tensor) -> dict[str, Tensor]:
    if not isinstance(given, Tensor) or given.dim() != 3 or given.is_floating_point() or given.dtype == torch.bool:
        what = f"{given.dtype} {list(given.shape)}" if isinstance(given, Tensor) else type(given).__name__
        raise LigerDistError(f"routes are {what}; expected integers [layers, tokens, experts of a token], or Routes.")
    # Those of the decoder; a vision tower and further heads have other tokens, or are not in an engine's answer.
    numbered = [(name, re.match(r"(.*?)\.(\d+)\.", name)) for name in names]
    prefix, _ = Counter(match[1] for _, match in numbered if match).most_common(1)[0]
    of_decoder = {name: int(match[2]) for name, match in numbered if match and match[1] == prefix}
    layers = len(model.get_submodule(_path_of(model, prefix)))  # type: ignore[arg-type]
    if len(given) == len(names):
        if len(given) == layers and len(of_decoder) < layers:
            raise LigerDistError(
                f"routes of {layers} layers may be those of all decoder layers of {type(model).__name__}, of which "
                f"{len(of_decoder)} have a router, or of its {len(names)} routers, of which some are no decoder "
                f"layer's; pass those of the {len(of_decoder)} decoder layers with a router."
            )
        return dict(zip(names, given.long(), strict=True))
    if len(given) == len(of_decoder):
        return dict(zip(of_decoder, given.long(), strict=True))
    if len(given) != layers:
        raise LigerDistError(
            f"routes of {len(given)} layers for {type(model).__name__}, which has {len(names)} routers in {layers} "
            "decoder layers; expected one entry for each router, or for each layer."
        )
    return {name: given[number].long() for name, number in of_decoder.items()}


def _path_of(model: nn.Module, prefix: str) -> str:
    names: Iterator[str] = (name for name, _ in model.named_modules())
    return next(name for name in names if _WRAPPERS.sub("", f"{name}.").removesuffix(".") == prefix)


def _check_experts(experts: Tensor) -> None:
    """Checks experts ``[tokens, k]`` of all routers.

    Raises:
        LigerDistError: a token has an expert twice, or only some of its experts.
    """
    ordered = experts.sort(-1).values
    is_twice = (ordered.diff() == 0) & (ordered[:, 1:] >= 0)
    # The choice of a token is the router's, or given.
    is_partly = (experts < 0).any(-1) & (experts >= 0).any(-1)
    require(
        ~(is_twice.any() | is_partly.any()),
        "routes name an expert twice for one token, or only some of its experts; expected different experts for each "
        "token, or -1 alone for its own choice",
        lambda: f"The first such token has {experts[is_twice.any(-1) | is_partly][0].tolist()}.",
    )


def _forward_of(router: nn.Module) -> Callable[..., Any]:
    """Returns a router's forward outside of passes."""
    kept = vars(router)["_liger_dist_forward"]
    forward: Callable[..., Any] = type(router).forward.__get__(router) if kept is None else kept
    return forward


@contextmanager
def _exchanged(router: nn.Module, choice: _Choice) -> Iterator[None]:
    """Gives a router the forward of a pass."""
    held = vars(router)
    before = held.get("forward")
    if isinstance(before, _Choice) and not in_backward():
        raise LigerDistError(
            "record_routing or replay_routing was entered within another one for the same model; leave that one first."
        )
    held["forward"] = choice
    if not isinstance(before, _Choice):
        held["_liger_dist_forward"] = before
    try:
        yield
    finally:
        held.pop("forward")
        if not isinstance(before, _Choice):
            held.pop("_liger_dist_forward")
        if before is not None:
            held["forward"] = before


class _Recomputed:
    """Function that a checkpoint runs again, in the pass of its first run."""

    def __init__(self, of_pass: _Pass, function: Callable[..., Any]) -> None:
        self.of_pass, self.function = of_pass, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.of_pass.running():
            return self.function(*args, **kwargs)


def _recomputed(running: _Pass, function: Callable[..., Any]) -> Callable[..., Any]:
    inside: Any = function
    while isinstance(inside, _Recomputed):
        if inside.of_pass is running:
            return function
        inside = inside.function
    return _Recomputed(running, function)


def _replay_when_recomputed(running: _Pass) -> None:
    """Lets the activation checkpoints around a router's call recompute it in the same pass."""
    for frame in checkpoint_frames():
        frame.recompute_fn = _recomputed(running, frame.recompute_fn)
    if torch.is_grad_enabled():
        return
    # A reentrant checkpoint runs without gradients, and keeps the function in the context of its autograd function.
    caller: Any = sys._getframe(1)
    while caller is not None:
        context: Any = caller.f_locals.get("ctx") if caller.f_code.co_name == "forward" else None
        function = getattr(context, "run_function", None)
        if function is not None:
            context.run_function = _recomputed(running, function)
        caller = caller.f_back
