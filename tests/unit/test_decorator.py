"""What ``@register`` accepts, and what the controller reads of it; dispatch modes of users."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from asyncwg._modes import CustomMode, as_mode, resolve_mode
from asyncwg.decorator import (
    REGISTERED,
    Dispatch,
    Execute,
    MethodOptions,
    PerRank,
    Replicate,
    Shard,
    make_nd_compute_dataproto_dispatch_fn,
    methods_of,
    register,
    register_dispatch_mode,
    unregistered_hint,
    update_dispatch_mode,
)
from asyncwg.errors import UsageError


def give(_group: Any, *args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def take(_group: Any, outputs: list[Any]) -> Any:
    return outputs


@pytest.fixture
def own_mode() -> Iterator[Dispatch]:
    """A mode that a user registered."""
    mode = register_dispatch_mode("test_own", give, take)
    yield mode
    if Dispatch.from_name("test_own"):
        Dispatch.remove("TEST_OWN")


def step(self: object, x: int) -> int:
    """Double it."""
    return 2 * x


def test_a_registered_function_is_untouched() -> None:
    def function(_self: object, x: int) -> int:
        return 2 * x

    assert register()(function) is function
    assert function(None, 2) == 4


def test_the_defaults_are_all_to_all_on_every_rank() -> None:
    def function(_self: object) -> None: ...

    options: MethodOptions = getattr(register()(function), REGISTERED)
    assert (options.mode, options.execute) == (Dispatch.ALL_TO_ALL, Execute.ALL)
    assert (options.uneven, options.blocking, options.timeout) == ("error", True, None)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"execute_mode": Dispatch.ALL_TO_ALL}, "must be an Execute"),
        ({"execute_mode": "all"}, "must be an Execute"),
        ({"uneven": "shrink"}, "'error', 'allow' or 'pad'"),
        ({"timeout": 0}, "more than 0 seconds"),
        ({"timeout": -1.0}, "more than 0 seconds"),
        ({"max_concurrency": 0}, "at least 1"),
        ({"dispatch_mode": "ONE_TO_ALL"}, "dispatch_mode must be"),
        ({"dispatch_mode": {"dispatch_fn": give}}, "collect_fn"),
        ({"dispatch_mode": {"dispatch_fn": give, "collect_fn": 5}}, "not callable"),
        ({"dispatch_mode": Execute.ALL}, "dispatch_mode must be"),
    ],
)
def test_an_option_that_can_not_be_right_is_refused_at_once(
    options: dict[str, Any], told: str
) -> None:
    with pytest.raises(UsageError, match=told):
        register(**options)


def test_an_execute_mode_without_a_meaning_is_refused() -> None:
    """It would be a name alone: nothing says which ranks run the call."""
    try:
        with pytest.raises(UsageError, match=r"Execute\.HALF does not say which ranks"):
            register(execute_mode=Execute.register("half"))
    finally:
        Execute.remove("half")


def test_an_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="dispach_mode"):
        register(dispach_mode=Dispatch.ONE_TO_ALL)  # type: ignore[call-overload]


def test_a_limit_of_concurrency_is_for_async_methods_only() -> None:
    with pytest.raises(UsageError, match="step is not one"):
        register(max_concurrency=2)(step)


def test_registering_what_is_no_function_is_refused() -> None:
    with pytest.raises(UsageError, match="plain method"):
        register()(property(lambda _self: 1))  # type: ignore[call-overload]


class Base:
    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def plain(self) -> None: ...

    @register()
    async def coroutine(self) -> None: ...

    @register()
    def generator(self) -> Iterator[int]:
        yield 1

    @register()
    async def stream(self) -> Any:
        yield 1

    @register(name="shown")
    def hidden_name(self) -> None: ...

    @staticmethod
    @register()
    def static(_first: int) -> None: ...

    @classmethod
    @register()
    def of_class(cls) -> None: ...

    @register()
    def overridden(self) -> None: ...

    def unregistered(self) -> None: ...


class Derived(Base):
    def overridden(self) -> None: ...  # pyright: ignore[reportIncompatibleVariableOverride]

    @register(dispatch_mode=Dispatch.RANK_ZERO)
    def plain(self) -> None: ...  # pyright: ignore[reportIncompatibleVariableOverride]


def test_the_methods_of_a_class_are_those_that_are_registered() -> None:
    assert set(methods_of(Base)) == {
        "plain", "coroutine", "generator", "stream", "shown", "static", "of_class", "overridden",
    }  # fmt: skip


def test_the_kind_of_a_method_is_seen() -> None:
    kinds = {name: method.kind for name, method in methods_of(Base).items()}
    assert kinds["plain"] == kinds["static"] == kinds["of_class"] == "def"
    assert kinds["coroutine"] == "async def"
    assert kinds["generator"] == "generator"
    assert kinds["stream"] == "async generator"


def test_a_method_with_another_name_for_its_proxy_is_called_by_its_own() -> None:
    method = methods_of(Base)["shown"]
    assert (method.name, method.label) == ("hidden_name", "Base.hidden_name")


def test_an_override_counts_only_when_it_is_registered_itself() -> None:
    methods = methods_of(Derived)
    assert "overridden" not in methods
    assert methods["plain"].options.mode is Dispatch.RANK_ZERO
    assert methods["plain"].label == "Derived.plain"


def test_two_methods_that_want_one_proxy_are_refused() -> None:
    class Twice:
        @register(name="same")
        def first(self) -> None: ...

        @register(name="same")
        def second(self) -> None: ...

    with pytest.raises(UsageError, match=r"Twice.second and Twice.first both want"):
        methods_of(Twice)


def test_a_descriptor_that_raises_is_not_asked() -> None:
    class Careful:
        @property
        def broken(self) -> int:
            raise RuntimeError

        @register()
        def fine(self) -> None: ...

    assert set(methods_of(Careful)) == {"fine"}


@pytest.mark.parametrize(
    ("cls", "name", "told"),
    [
        (Base, "plian", "did you mean 'plain'"),
        (Base, "xyzzy", "has no registered method 'xyzzy'"),
        (Base, "unregistered", "decorate it with @register"),
        (Derived, "overridden", "overrides a registered method"),
    ],
)
def test_a_name_that_is_no_proxy_is_explained(cls: type, name: str, told: str) -> None:
    assert told in unregistered_hint(cls, name, methods_of(cls))


def test_the_built_in_modes_are_verls() -> None:
    assert Dispatch.names() == [
        "RANK_ZERO", "ONE_TO_ALL", "ALL_TO_ALL", "DP_COMPUTE", "DP_COMPUTE_PROTO",
        "DP_COMPUTE_PROTO_WITH_FUNC", "DP_COMPUTE_METRIC", "DIRECT_ROLLOUT_METHOD",
    ]  # fmt: skip
    assert Execute.names() == ["ALL", "RANK_ZERO", "ANY"]


def test_members_are_found_by_name_and_counted() -> None:
    assert Dispatch["ONE_TO_ALL"] is Dispatch.ONE_TO_ALL
    assert Dispatch.from_name("one_to_all") is Dispatch.ONE_TO_ALL
    assert Dispatch.from_name("nonesuch") is None
    assert len(Dispatch) == len(list(Dispatch)) == len(set(Dispatch.values()))
    assert "ONE_TO_ALL" in Dispatch
    assert Dispatch.ONE_TO_ALL in Dispatch
    assert Execute.ALL not in Dispatch
    assert repr(Dispatch.ONE_TO_ALL) == "Dispatch.ONE_TO_ALL"


@pytest.mark.parametrize("member", [*Dispatch, *Execute], ids=repr)
def test_a_built_in_member_is_itself_after_pickling(member: Any) -> None:
    assert pickle.loads(pickle.dumps(member)) is member


def test_a_registered_mode_is_a_member_under_its_name_in_capitals(own_mode: Dispatch) -> None:
    assert Dispatch.TEST_OWN is own_mode  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    assert own_mode.name == "TEST_OWN"


def test_a_registered_mode_has_its_functions(own_mode: Dispatch) -> None:
    assert resolve_mode(own_mode) == CustomMode(give, take)


def test_a_mode_can_not_be_registered_twice(own_mode: Dispatch) -> None:
    with pytest.raises(ValueError, match="TEST_OWN exists already"):
        register_dispatch_mode("Test_Own", give, take)


def test_a_built_in_name_can_not_be_registered() -> None:
    with pytest.raises(ValueError, match="exists already"):
        register_dispatch_mode("one_to_all", give, take)


def test_an_updated_mode_has_the_new_functions(own_mode: Dispatch) -> None:
    def other(_group: Any, outputs: list[Any]) -> int:
        return len(outputs)

    update_dispatch_mode(own_mode, give, other)
    assert resolve_mode(own_mode) == CustomMode(give, other)


def test_what_is_no_mode_can_not_be_updated() -> None:
    with pytest.raises(UsageError, match="register_dispatch_mode"):
        update_dispatch_mode("ONE_TO_ALL!", give, take)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_a_removed_mode_is_no_member_and_its_name_is_free_again(own_mode: Dispatch) -> None:
    assert Dispatch.remove("test_own") is own_mode
    assert own_mode not in Dispatch
    assert not hasattr(Dispatch, "TEST_OWN")
    again = register_dispatch_mode("test_own", give, take)
    assert again is not own_mode


def test_a_registered_mode_brings_its_functions_to_a_process_that_has_not_registered_it() -> None:
    """A worker unpickles a class whose methods refer to it."""
    script = (
        "import cloudpickle, sys\n"
        "from asyncwg import register_dispatch_mode\n"
        "mode = register_dispatch_mode('there', lambda g, *a, **k: (a, k), lambda g, o: 'joined')\n"
        "sys.stdout.buffer.write(cloudpickle.dumps(mode))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=60, check=True
    )
    mode = pickle.loads(done.stdout)
    try:
        assert mode is Dispatch.from_name("there")
        resolved = resolve_mode(mode)
        assert isinstance(resolved, CustomMode)
        assert resolved.collect_fn(None, []) == "joined"
    finally:
        Dispatch.remove("there")


def test_a_mode_that_arrives_does_not_replace_the_functions_it_has_here(own_mode: Dispatch) -> None:
    travelling = pickle.dumps(own_mode)

    def other(_group: Any, outputs: list[Any]) -> int:
        return len(outputs)

    update_dispatch_mode(own_mode, give, other)
    assert pickle.loads(travelling) is own_mode
    assert resolve_mode(own_mode) == CustomMode(give, other)


def test_a_mode_can_be_given_as_a_dict() -> None:
    assert as_mode({"dispatch_fn": give, "collect_fn": take}) == CustomMode(give, take)


def test_a_mesh_mode_survives_a_pickle() -> None:
    mode = make_nd_compute_dataproto_dispatch_fn("actor")
    assert as_mode(mode) is mode
    assert pickle.loads(pickle.dumps(mode)) == mode


def test_a_registered_method_survives_a_pickle_with_its_options() -> None:
    options = methods_of(Derived)["plain"].options
    assert pickle.loads(pickle.dumps(options)) == options


def test_per_rank_keeps_its_values_as_they_are_now() -> None:
    values = [1, 2]
    marker = PerRank(values)
    values.append(3)
    assert marker.values == [1, 2]


@pytest.mark.parametrize("marker", [Shard([1]), Replicate([1]), PerRank([[1]])])
def test_a_marker_survives_a_pickle(marker: Any) -> None:
    back = pickle.loads(pickle.dumps(marker))
    assert type(back) is type(marker)
    assert [getattr(back, slot) for slot in type(back).__slots__] in ([[1]], [[[1]]])
