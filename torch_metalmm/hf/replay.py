"""Steps of a fused model, recorded once and replayed by one call.

The step of a PackedCache that fuse_(model, cache=...) makes is a list of ops, whose arguments are
the same tensors in each step but for the token ids, positions, slots and the length of the cache.
Two steps that follow each other are recorded as they are computed, with these in memory that stays
(csrc/ops/replay; caches/recorded.py). Where the two lists differ in nothing but the values in these
tensors, later steps fill the tensors and run the list.

What decides which code of Python runs is compared before each replay (unchanged.py), and the memory
that the ops read. A step that is not like the recorded ones is computed by the model itself, and
recorded if it may be; `why` says why the last one was not.
"""

from __future__ import annotations

import inspect
from collections import Counter, OrderedDict
from collections.abc import Callable
from contextvars import ContextVar
from operator import ne
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..models.cache_argument import NAMES, cache_in, with_cache
from ..models.fuse.report import describe_layers
from ..nn.again import Again, who_notes
from ..nn.exact import is_exact
from ..nn.hidden import LastHidden, last_hidden
from ..nn.stand_in import StandIn
from .cache import PackedCache
from .caches.layers import Unrecorded
from .caches.paged import PagedCache
from .caches.recorded import PackedStep, PagedStep
from .graphs import Runs, firsts
from .unchanged import Unchanged

_KINDS: dict[type, Any] = {PackedCache: PackedStep, PagedCache: PagedStep}
MOST = 8  # tokens of a sequence in a step
_HELD = 16  # kinds of steps on a cache, each with the tensors between its ops
_TRIES = 3  # recordings that a change of the model ends before a replay, or that differ
# Methods of a tensor that no op of torch's computes, and that give values to the host.
_READ_BY_HOST = frozenset(("tolist", "numpy", "__array__", "__dlpack__"))
_records: ContextVar[bool] = ContextVar("records", default=False)


class Refused(Exception):
    """Why a step is not recorded."""


class _Step:
    """The recordings of one kind of step on one cache, then their list."""

    def __init__(self, cache: Any, ids: Tensor, positions: Tensor | None) -> None:
        self.native = torch.classes.metalmm.Step()
        self.cache = _KINDS[type(cache)](cache, ids.shape[1], ids.device)
        self.ids = _staying(ids)
        self.positions = None if positions is None else _staying(positions)
        self.recorded = self.replays = self.tries = self.differences = 0
        self.place: Any = None
        self.why = ""
        self.model: Unchanged | None = None  # as it was recorded
        self.output: _Output | None = None  # of what the model returns
        self.hidden: LastHidden | None = None  # whose rows the list gives, too
        self.again: Again | None = None  # its recurrent ops, with the list's tensors
        self.backs: dict[int, Runs] = {}  # these for so many rows
        # Chains that begin with this step, by their length: (the kind of the others, the chain).
        self.chains: dict[int, tuple[_Step, Runs]] = {}
        self.run: Runs | None = None
        self.addresses: list[tuple[Tensor, int]] = []  # that code of Python has read

    def holds(self) -> bool:
        """Whether what was recorded, or found to be no list, is what the model would compute."""
        if self.model is None or not self.model.same():
            return False
        if self.addresses and any(t.data_ptr() != place for t, place in self.addresses):
            return False
        return self.run is None or bool(self.native.holds())

    def fill(self, cache: Any, ids: Tensor, positions: Tensor | None) -> None:
        if ids is not self.ids:
            self.ids.copy_(ids)
        if self.positions is not None and positions is not self.positions:
            self.positions.copy_(positions)  # type: ignore[arg-type]
        self.cache.fill(cache)

    def note(self, noting: Again, shown: list[Tensor]) -> None:
        """Let it have the step's recurrent ops, with what the list has computed for them."""
        again = self.again.of(shown)  # type: ignore[union-attr]
        if again is not self.again:
            self.again, self.backs = again, {}
        noting.calls, noting.whole = again.calls, self._go_back

    def _go_back(self, count: int) -> None:
        """The recurrent ops for the first `count` rows alone."""
        if count not in self.backs:
            device, run = self.ids.device, self.again.run  # type: ignore[union-attr]
            self.backs[count] = Runs(lambda: run(count) or [], device, 0)
        self.backs[count]()


def _staying(values: Tensor) -> Tensor:
    """Memory for such values; their own where a caller has said that it stays."""
    if getattr(values, "stays", False):
        return values
    with torch.inference_mode(False):
        return torch.empty_like(values)


class _Recorded(TorchFunctionMode):
    """Inside, the ops of a step are recorded. seen: what the host read beside them, or "".

    A step that fails leaves no recording.
    """

    def __init__(self, step: _Step) -> None:
        super().__init__()
        self._step, self.seen = step, ""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = getattr(function, "__name__", "")
        if name in _READ_BY_HOST:
            self.seen = self.seen or f"{name} gives the host a value"
        out = function(*args, **(kwargs or {}))
        if name == "data_ptr" and isinstance(args[0], nn.Parameter):
            self._step.addresses.append((args[0], out))
        return out

    def __enter__(self) -> _Recorded:
        self._before = _records.set(True)
        self._step.native.start()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __exit__(self, kind: Any, *error: Any) -> None:
        super().__exit__(kind, *error)  # type: ignore[no-untyped-call]
        _records.reset(self._before)
        self._step.native.stop(kind is None)
        if kind is not None:
            self._step.recorded = 0


class _Output:
    """The output of a model, made from the fields of one of its kind: 1 us in place of 15, in which
    transformers goes through all fields of the dataclass for each of them."""

    def __init__(self, kind: Any, cache: str) -> None:
        """cache: the name of the field of this. The object itself would keep its own recordings."""
        self._kind, self._cache = kind, cache
        self._attributes = vars(kind(**{"logits": 0, cache: 0}))

    def of(self, logits: Tensor, cache: Any) -> Any:
        out, fields = self._kind.__new__(self._kind), {"logits": logits, self._cache: cache}
        vars(out).update(self._attributes, **fields)
        for name, value in fields.items():
            OrderedDict.__setitem__(out, name, value)
        return out


class Replayed(StandIn):
    """The forward of a model whose steps on a PackedCache are recorded and replayed."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self._prepare()

    @property
    def forward(self) -> Any:
        """This object, which has the signature of the model's own."""
        return self

    def _prepare(self) -> None:
        forward = type(self.module).forward.__get__(self.module)
        signature = inspect.signature(forward)
        self.__signature__, self._first = signature, next(iter(signature.parameters), "")
        self.why, self.replays = "no step on a PackedCache has been computed", 0
        # The kinds of steps of each cache, the one that was taken last at the end.
        self._caches: WeakKeyDictionary[Any, OrderedDict[Any, _Step]] = WeakKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {"module": self.module}  # recordings are of this model's memory

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.module = state["module"]
        self._prepare()

    def kinds(self) -> list[_Step]:
        """The kinds of steps that are known, of all caches."""
        return [step for kinds in self._caches.values() for step in kinds.values()]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.original(*args, **kwargs)
        if len(args) == 1 and self._first == "input_ids":
            kwargs = {"input_ids": args[0], **kwargs}
            args = args[1:]
        try:
            cache, step = self._filled(args, kwargs)
        except Refused as refused:
            self.why, step = str(refused), None
        if step is None:
            return self.original(*args, **kwargs)
        if step.recorded < 2:
            return self._record(step, cache, kwargs)
        return self._replay(step, cache)

    def chained(
        self, first: dict[str, Any], then: dict[str, Any], count: int, seen: Callable[[], Tensor]
    ) -> Tensor | None:
        """`count` steps as one: one of the arguments `first`, then some of `then`, which are memory
        that each step writes for the next; what `seen` gives, [1, 1], behind each. None, before any
        step: they are not all recorded, or without room.

        What fails within leaves entries of some steps in the cache. `seen` is kept with the
        cache's recordings: what refers to the cache would keep both for ever.
        """
        try:
            cache, begin = self._filled((), first)
            if begin.recorded < 2 or not begin.cache.has_room(count - 1):
                return None
            begin.cache.done(cache)
            try:
                _, step = self._filled((), then)
                is_ready = step.recorded == 2
            except Refused:
                is_ready = False
            if not is_ready:
                cache.crop(-begin.ids.shape[1])
                return None
        except Refused:
            return None
        if begin.chains.get(count, (None,))[0] is not step:
            begins = begin.native.run

            def run() -> list[Tensor]:
                begins()
                found = [seen()]
                for i in range(1, count):
                    if i > 1:
                        step.cache.fixed.advance()
                    step.native.run()
                    found.append(seen())
                return [torch.cat(found, 1)]

            begin.chains[count] = step, Runs(run, step.ids.device, 0)
        with step.cache.fixed.advanced(count - 2):
            (found,) = begin.chains[count][1]()
        for each in (begin, *[step] * (count - 1)):
            each.replays += 1
            if each is step:
                step.cache.done(cache)
        self.replays, self.why = self.replays + count, ""
        return found

    def _filled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, _Step]:
        """(the cache, what its step is recorded or replayed by, with the values of this call)."""
        cache, key, ids, positions, mask = _of_call(args, kwargs)
        steps = self._caches.get(cache)
        if steps is None:
            steps = self._caches[cache] = OrderedDict()
        step = steps.get(key)
        if step is None or not step.cache.reads(cache):
            if why := _KINDS[type(cache)].refusal(cache, ids.shape[1]):
                raise Refused(why)
            if step is not None and not step.cache.reads(cache):  # the entries are in other memory
                steps.clear()
                step = None
        if mask is not None and not _is_full(mask, cache, ids):  # of tokens: the cache has some
            raise Refused("attention_mask hides tokens")
        if step is None or not step.holds():
            step = self._begun(cache, ids, positions, step)
            if len(steps) == _HELD and key not in steps:
                steps.popitem(last=False)
        steps[key] = step
        steps.move_to_end(key)
        if step.why:
            raise Refused(step.why)
        step.fill(cache, ids, positions)
        return cache, step

    def _begun(
        self, cache: Any, ids: Tensor, positions: Tensor | None, before: _Step | None
    ) -> _Step:
        """A step of a kind that is recorded from here on, in the place of one before."""
        step = _Step(cache, ids, positions)
        if before is None or before.replays == 0:
            step.tries = (before.tries if before is not None else 0) + 1
        step.model = Unchanged(self.module)
        step.why = step.model.why
        if step.tries > _TRIES:
            step.why = step.why or "the model changes between its steps"
        return step

    def _record(self, step: _Step, cache: Any, kwargs: dict[str, Any]) -> Any:
        """The model's own forward, recorded."""
        firsts.count += 1
        given = {**kwargs, "input_ids": step.ids}
        given.pop("attention_mask", None)
        if step.positions is not None:
            given["position_ids"] = step.positions
        try:
            with step.cache.recorded(cache), _Recorded(step) as read:
                out = self.original(**given)
        except Unrecorded as reason:
            self.why = step.why = str(reason)
        step.again = who_notes()
        if step.why:
            if step.again is not None:
                step.again.calls.clear()  # of the recording
            return self.original(**kwargs)
        # Numbers that code of Python may have read must differ, else what follows from them agrees.
        place, step.place = step.place, step.cache.place
        if step.recorded == 0 or all(map(ne, place, step.place)):
            step.recorded += 1
        step.hidden = last_hidden(self.module)
        results = [out.logits, *([step.hidden.rows] if step.hidden else [])]
        shown = [] if step.again is None else step.again.shown()
        step.why = _unlike(out, cache) or read.seen or step.native.problem(results + shown)
        self.why = step.why
        if step.why and step.recorded == 2 and step.differences < _TRIES - 1:
            # The first may have had what is done once, say a copy for a device: one more.
            step.recorded, step.differences, step.why = 1, step.differences + 1, ""
        elif not step.why and step.recorded == 2:
            step.output = _Output(type(out), *with_cache(self.module, cache))
            step.native.keep(results, shown)
            step.run = Runs(step.native.run, step.ids.device, len(shown))
            out.logits = out.logits.clone()  # what was recorded is the list's
        if step.hidden is not None:
            step.hidden.rows = results[1].clone()
        return out

    def _replay(self, step: _Step, cache: Any) -> Any:
        logits, *others = step.run()  # type: ignore[misc]
        if step.hidden is not None:
            step.hidden.rows = others.pop(0)
        if step.again is not None and (noting := who_notes()) is not None:
            step.note(noting, others)
        step.cache.done(cache)
        step.replays += 1
        self.replays, self.why = self.replays + 1, ""
        return step.output.of(logits, cache)  # type: ignore[union-attr]


def _of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Tensor, Any, Any]:
    """(cache, what a recording is for, ids, positions, mask). Refused: it may not be recorded."""
    cache, ids = cache_in(kwargs), kwargs.get("input_ids")
    kind = _KINDS.get(type(cache))
    if args or kind is None or ids is None or ids.dim() != 2:
        raise Refused("a call without a PackedCache, or of other inputs than ids by their names")
    if ids.shape[1] > MOST:
        raise Refused(f"{ids.shape[1]} tokens in one step; up to {MOST} are recorded")
    if _records.get():
        raise Refused("a step of another model is being recorded, of which this one is a part")
    if torch.is_grad_enabled():
        raise Refused("gradients are recorded; call under torch.no_grad() or inference_mode()")
    if torch._C._is_any_autocast_enabled():
        raise Refused("autocast")
    if torch._C._len_torch_dispatch_stack() or torch._C._len_torch_function_stack():
        raise Refused("a mode of torch sees the ops")
    positions, mask, others = None, None, []
    for name, value in kwargs.items():
        if name == "position_ids":
            positions = value
        elif name == "attention_mask":
            mask = value
        elif name != "input_ids" and name not in NAMES:
            if value is not None and type(value) not in (bool, int):
                raise Refused(f"the argument {name}")
            others.append((name, value))
    if kwargs.get("return_dict") is False:
        raise Refused("return_dict=False")
    if not isinstance(mask, Tensor | None):
        raise Refused("an attention_mask for each kind of layer")
    place = None if positions is None else (*positions.shape, positions.dtype)
    place = place, getattr(ids, "stays", False)
    mode = torch.is_inference_mode_enabled(), is_exact() and ids.shape[1] > 1, bool(who_notes())
    key = (*ids.shape, ids.dtype, ids.device, place, *others, *mode)
    return cache, (kind.key(cache), key), ids, positions, mask


def _is_full(mask: Tensor, cache: Any, ids: Tensor) -> bool:
    """Whether the mask [B, tokens] hides none of the entries that are held, nor of the new ones."""
    if mask.dim() != 2 or mask.shape[1] != cache.get_seq_length() + ids.shape[1]:
        return False
    return bool(mask.all())  # as transformers asks at every step


def _unlike(out: Any, cache: Any) -> str:
    """Names of the outputs beside logits and the cache, as a refusal."""
    if not hasattr(out, "keys"):
        return f"the model returns a {type(out).__name__}"
    others = [n for n in out if n != "logits" and n not in NAMES]
    if others or not isinstance(out.get("logits"), Tensor) or cache_in(out) is not cache:
        return f"the model returns {', '.join(others) or 'another cache'}"
    return ""


def replayed(model: Any) -> Replayed | None:
    found = model.__dict__.get("forward")
    return found if isinstance(found, Replayed) else None


def explain(model: Any) -> str:
    """How the steps of a model run: what of them is replayed, and why the rest is not; last, which
    decoder layers fuse_ has put into our ops.

    ValueError: its steps are not recorded at all.
    """
    steps = replayed(model)
    if steps is None:
        raise ValueError(
            f"model: {type(model).__name__} records no steps; fuse_(model, cache=...) sees to that"
        )
    last = f"the last step was not: {steps.why}" if steps.why else "the last step was, too"
    lines = [f"{steps.replays} steps were replayed; {last}"]
    lines += [_line(step) for step in steps.kinds()]
    return "\n".join(lines + describe_layers(model))


def _line(step: _Step) -> str:
    """A line about one kind of step."""
    sequences, tokens = step.ids.shape
    what = f"{sequences} x {tokens} tokens on {step.ids.device}: "
    if step.why:
        return f"{what}the model's own, {step.why}"
    if step.run is None:
        return f"{what}recorded {step.recorded} times of 2"
    called = step.native.called()
    passes, lists = step.native.launched()
    graph = ", as a graph of torch's" if step.run.graph is not None else ""
    if step.run.refusal:
        graph = f", of which torch captures no graph: {step.run.refusal}"
    plural = "s" if lists > 1 else ""
    launched = f"{passes} passes in {lists} list{plural}{graph}" if passes else ""
    ops = [f"{count} {name}" for name, count in Counter(called).items()]
    return what + "; ".join(part for part in (launched, ", ".join(ops)) if part)
