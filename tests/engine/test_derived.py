"""Which modules hold tensors derived from parameters, and how these are brought up to date after a scatter."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from weightcast.engine.vllm.derived import Derived, Rules, find_derived  # noqa: E402


class Method:
    """A quantisation method; its hook is idle."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise AssertionError("it must not run on live parameters")


class Plain(Method):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise AssertionError("it must not run on live parameters")


class Moving(Method):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise AssertionError("it must not run on live parameters")


class Quantised(Method):
    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        raise AssertionError("it must not run on live parameters")


class Backend:
    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        """Nothing is derived."""


class Sinks(Backend):
    """Keeps a copy of a parameter that another module holds."""

    def __init__(self, source: torch.Tensor):
        self.source, self.sinks = source, source.float()

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.sinks.copy_(self.source)


class Both(Backend):
    """Chooses one of two backends for each batch."""

    def __init__(self, *backends: Backend):
        self._backends = backends

    def get_impl_variants(self) -> tuple[Backend, ...]:
        return self._backends

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        for one in self._backends:
            one.process_weights_after_loading(dtype)


class Attention(torch.nn.Module):
    def __init__(self, impl: Backend):
        super().__init__()
        self.impl = impl
        self.kv_cache = torch.zeros(3)

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.impl.process_weights_after_loading(dtype)


class Absorbed(Attention):
    """Multiplies with its projection in another layout; drops it in the end, as for AMX."""

    declared = ()

    def __init__(self, projection: torch.nn.Module, drops: bool = False):
        super().__init__(Backend())
        self.projection, self.drops = projection, drops

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        new = self.projection.weight.detach().to(dtype).t().contiguous()
        if hasattr(self, "turned"):
            self.turned.copy_(new)
        else:
            self.turned = torch.nn.Parameter(new, requires_grad=False)
        if self.drops:
            self.projection.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


RULES = Rules(
    is_attention=lambda module: isinstance(module, Attention),
    idle=frozenset(one.process_weights_after_loading for one in (Attention, Backend, Method)),
    method=Method,
    plain=(Plain, Moving),
    moving=(Moving,),
    declared=lambda module: getattr(module, "declared", module._parameters),
    around=nullcontext,
)


def linear(method: Method | None = None) -> torch.nn.Module:
    layer = torch.nn.Linear(3, 2, dtype=torch.bfloat16)
    layer.quant_method = method
    return layer.requires_grad_(False)


def found(**modules: torch.nn.Module) -> Derived:
    return find_derived(torch.nn.ModuleDict(modules), torch.bfloat16, RULES)


def test_plain_layers_derive_nothing() -> None:
    derived = found(attention=Attention(Backend()), a=linear(Plain()), b=linear(Method()), c=linear())
    assert (dict(derived.again), dict(derived.reload), derived.made) == ({}, {}, frozenset())
    assert derived.unsupported is None
    assert derived.derive_again(["a.weight", "b.weight"]) == ()


@pytest.mark.parametrize("both", [False, True])
def test_copy_in_a_backend_follows_the_parameter_it_was_made_of(both: bool) -> None:
    source = linear()
    sinks = Sinks(source.bias)
    attention = Attention(Both(Backend(), sinks) if both else sinks)
    derived = found(source=source, attention=attention)
    assert dict(derived.again) == {"source.bias": ("attention",)}
    copy = sinks.sinks
    source.bias.fill_(5)
    assert derived.derive_again(["source.weight"]) == ()
    assert copy.tolist() != [5, 5]
    assert derived.derive_again(["source.weight", "source.bias"]) == ("attention",)
    assert sinks.sinks is copy
    assert copy.tolist() == [5, 5]


@pytest.mark.parametrize("drops", [False, True])
def test_parameters_that_a_hook_makes_are_named_and_those_it_drops_are_put_back(drops: bool) -> None:
    projection = linear(Plain())
    weight, attention = projection.weight, Absorbed(projection, drops)
    attention.process_weights_after_loading(torch.bfloat16)
    projection.weight = weight
    derived = found(projection=projection, attention=attention)
    assert derived.made == {"attention.turned"}
    assert derived.again["projection.weight"] == ("attention",)
    turned, weight[0, 1] = attention.turned, 7
    assert derived.derive_again(["projection.weight"]) == ("attention",)
    assert attention.turned is turned
    assert turned[1, 0] == 7
    assert projection.weight is weight


def test_parameters_of_quantised_layers_go_through_a_reload() -> None:
    derived = found(a=linear(Quantised()), b=linear(Plain()))
    assert set(derived.reload) == {"a.weight", "a.bias"}
    assert derived.reload["a.weight"] == "Quantised changes it after loading"


def test_parameters_of_layers_that_keep_more_beside_them_go_through_a_reload() -> None:
    split, viewed = linear(Plain()), linear(Plain())
    split.halves = torch.zeros(2, 3)
    viewed.turned = viewed.weight.data.t()
    derived = found(split=split, viewed=viewed)
    assert set(derived.reload) == {"split.weight", "split.bias"}
    assert derived.reload["split.weight"] == "vLLM keeps halves beside it"


def test_hook_of_the_whole_model_is_not_supported() -> None:
    class Model(torch.nn.Module):
        def process_weights_after_loading(self) -> None:
            """Something."""

    assert find_derived(Model(), torch.bfloat16, RULES).unsupported == "Model computes with its weights after loading"


def test_hooks_run_inside_what_they_need() -> None:
    inside: list[bool] = []
    source = linear()
    sinks = Sinks(source.bias)
    sinks.process_weights_after_loading = lambda dtype: inside.append(around.entered)  # type: ignore[method-assign]
    around = SimpleNamespace(entered=False)

    class Around:
        def __enter__(self) -> None:
            around.entered = True

        def __exit__(self, *_: object) -> None:
            around.entered = False

    rules = Rules(**{**vars(RULES), "around": Around})
    model = torch.nn.ModuleDict({"source": source, "attention": Attention(sinks)})
    find_derived(model, torch.bfloat16, rules).derive_again(["source.bias"])
    assert (inside, around.entered) == ([True], False)


def test_parameters_that_a_method_may_have_moved_are_named() -> None:
    model = torch.nn.ModuleDict({"experts": linear(Moving()), "plain": linear(Plain()), "other": linear()})
    assert find_derived(model, torch.float32, RULES).moved == {
        f"experts.{name}" for name, _ in linear().named_parameters()
    }
