"""Which number stands for which method of which role."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncwg import ClassWithInitArgs, UsageError, Worker, create_colocated_worker_cls, register
from asyncwg._catalog import catalogs_of
from asyncwg._wire import codec
from asyncwg._wire.frames import EXTRAS, NONE, Kind
from asyncwg._worker.service import Service


class Blocks:
    """Stands for the arena: the body is the stream, without buffers."""

    def unpack(self, body: memoryview, _n_buffers: int, _flags: int) -> tuple[Any, list[Any]]:
        return body, []


def with_methods(names: list[str]) -> type:
    """Make a class whose methods return the object and their own name."""

    def method(name: str) -> Any:
        return register()(lambda self: (self, name))

    return type("Made", (), {name: method(name) for name in names})


names = st.text(alphabet="ab_", min_size=1, max_size=4).filter(lambda name: "__" not in name)
"""Few letters, so that many pairs of names would be one string."""


@given(st.dictionaries(names, st.lists(names, min_size=1, max_size=3), min_size=1, max_size=4))
def test_every_method_of_every_role_is_found_by_its_number(methods: dict[str, list[str]]) -> None:
    cls: Any = create_colocated_worker_cls(
        {role: ClassWithInitArgs(with_methods(found)) for role, found in methods.items()}
    ).cls
    catalogs, numbered = catalogs_of(cls)
    made = cls()
    objects = {**made.fused_worker_dict, None: made}
    blocks: Any = Blocks()
    service = Service(objects, [method.address for method in numbered], blocks, ())
    seen: set[int] = set()
    for role, found in methods.items():
        for name in set(found):
            number = catalogs[role].numbers[name]
            assert number not in seen
            seen.add(number)
            by_number = service.request(1, Kind.CALL, NONE, number, 0, memoryview(b""))
            assert by_number.function() == (objects[role], name)
            assert by_number.call.method == f"{role}.Made.{name}"
            body = memoryview(codec.encode(((), {}, {"name": name})).stream)
            stand_in = catalogs[role].unnumbered
            by_name = service.request(1, Kind.CALL, EXTRAS, stand_in, 0, body)
            assert by_name.function() == (objects[role], name)
            assert by_name.number == number


@given(st.lists(names, min_size=1, max_size=5, unique=True))
def test_a_function_gets_the_object_of_its_role(roles: list[str]) -> None:
    cls: Any = create_colocated_worker_cls(
        {r: ClassWithInitArgs(with_methods(["x"])) for r in roles}
    ).cls
    catalogs, _ = catalogs_of(cls)
    made = cls()
    objects = {**made.fused_worker_dict, None: made}
    blocks: Any = Blocks()
    service = Service(objects, (), blocks, ())
    body = memoryview(codec.encode(((max, 5), {})).stream)
    for role, catalog in catalogs.items():
        request = service.request(1, Kind.RUN, 0, catalog.unnumbered, 0, body)
        assert request.args == (objects[role], 5)


def test_more_roles_than_there_are_numbers_for_are_refused() -> None:
    cls: Any = create_colocated_worker_cls(
        {f"r{i}": ClassWithInitArgs(with_methods(["x"])) for i in range(256)}
    ).cls
    with pytest.raises(UsageError, match=r"has 256 roles .* no more than 255"):
        catalogs_of(cls)


def test_an_object_that_answers_to_any_name_has_no_meshes() -> None:
    class Anything:
        def __getattr__(self, name: str) -> Any:
            return lambda *_args: name

    blocks: Any = Blocks()
    assert Service({None: Anything()}, (), blocks, ()).meshes() is None


def test_meshes_are_told_once_and_by_role() -> None:
    actor, critic = Worker(), Worker()
    blocks: Any = Blocks()
    service = Service({"actor": actor, "critic": critic, None: Worker()}, (), blocks, ())
    assert service.meshes() is None
    critic._register_dispatch_collect_info("m", 1, True)
    assert service.meshes() is not None
    assert service.meshes() is None
