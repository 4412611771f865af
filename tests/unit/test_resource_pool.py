"""Pools: how ranks are counted, which devices they get, and who may share them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncwg import resource_pool
from asyncwg._devices import MASKS, find_devices, parse_mask, read_mask
from asyncwg.errors import ResourceError, UsageError
from asyncwg.resource_pool import (
    ResourcePool,
    ResourcePoolManager,
    merge_resource_pool,
    split_resource_pool,
)

SetMask = Callable[[str | None], None]


class FakeNvml(ModuleType):
    """As much of pynvml as is asked for. ``slices`` maps a GPU's index to its MIG instances."""

    class NVMLError(Exception):
        """Base of everything that NVML complains about."""

    def __init__(self, gpus: int | None, slices: dict[int, list[str]] | None = None) -> None:
        super().__init__("pynvml")
        self.gpus = gpus
        self.slices = slices or {}
        self.open = 0

    def nvmlInit(self) -> None:
        if self.gpus is None:
            raise self.NVMLError("driver not loaded")
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetCount(self) -> int:
        assert self.gpus is not None
        return self.gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return SimpleNamespace(index=index, uuid=f"GPU-{index}{index}{index}{index}-abcd")

    def nvmlDeviceGetUUID(self, handle: Any) -> bytes | str:
        uuid: str = handle.uuid
        # Bytes as from older bindings.
        return uuid.encode() if uuid.startswith("GPU-0") else uuid

    def nvmlDeviceGetMigMode(self, handle: Any) -> list[int]:
        if not self.slices:
            raise self.NVMLError("not supported")
        divided = int(handle.index in self.slices)
        return [divided, divided]

    def nvmlDeviceGetMaxMigDeviceCount(self, _handle: Any) -> int:
        return 7

    def nvmlDeviceGetMigDeviceHandleByIndex(self, handle: Any, index: int) -> Any:
        found = self.slices[handle.index]
        if index >= len(found):
            raise self.NVMLError("not found")
        return SimpleNamespace(uuid=found[index])


UseNvml = Callable[..., FakeNvml]


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> UseNvml:
    """``nvml(gpus, slices)`` makes a machine; before that there is no driver."""

    def use(gpus: int | None, slices: dict[int, list[str]] | None = None) -> FakeNvml:
        fake = FakeNvml(gpus, slices)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    use(None)
    return use


@pytest.fixture(autouse=True)
def mask(monkeypatch: pytest.MonkeyPatch, nvml: UseNvml) -> SetMask:
    """``mask("0,1")`` sets the controller's mask; at first there is none, and no driver."""
    for name in MASKS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(resource_pool, "_ledger", resource_pool._Ledger())

    def use(value: str | None) -> None:
        if value is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)

    return use


class TestCounting:
    def test_world_size_store_and_local_lists_are_as_in_verl(self) -> None:
        pool = ResourcePool([2, 3])
        assert pool.world_size == 5
        assert pool.store == pool() == [2, 3]
        assert pool.local_world_size_list() == [2, 2, 3, 3, 3]
        assert pool.local_rank_list() == [0, 1, 0, 1, 2]

    def test_nodes_can_be_added(self) -> None:
        pool = ResourcePool()
        assert pool.world_size == 0
        pool.add_node(2)
        pool.add_node(1)
        assert pool.store == [2, 1]

    def test_changing_the_returned_store_changes_nothing(self) -> None:
        pool = ResourcePool([2])
        pool.store.append(7)
        assert pool.store == [2]

    def test_integers_of_other_libraries_count(self) -> None:
        class Index:
            def __index__(self) -> int:
                return 3

            __int__ = __index__

        nodes: Any = [Index()]
        assert ResourcePool(nodes).store == [3]

    @pytest.mark.parametrize(
        "nodes", [4, "4", [0], [-1], [2.0], [True], ["2"], [None], {2}, b"2", 0, False, [[2]]]
    )
    def test_what_is_no_list_of_positive_ints_is_refused(self, nodes: Any) -> None:
        with pytest.raises(UsageError, match="process_on_nodes"):
            ResourcePool(nodes)

    @pytest.mark.parametrize("value", [0, -1, 1.5, True, None, "3"])
    @pytest.mark.parametrize("name", ["max_colocate_count", "n_gpus_per_node"])
    def test_other_numbers_are_checked_too(self, name: str, value: Any) -> None:
        with pytest.raises(UsageError, match=name):
            ResourcePool([1], **{name: value})

    def test_use_gpu_is_a_bool_or_none(self) -> None:
        with pytest.raises(UsageError, match="use_gpu"):
            ResourcePool([1], use_gpu=1)  # type: ignore[arg-type]

    def test_a_bad_node_is_refused_by_add_node(self) -> None:
        with pytest.raises(UsageError, match="at least 1"):
            ResourcePool().add_node(0)


class TestMask:
    @pytest.mark.parametrize(
        ("value", "entries"),
        [
            ("", ()),
            ("-1", ()),
            ("NoDevFiles", ()),
            ("0", ("0",)),
            (" 3 , 1", ("3", "1")),
            ("0,-1,1", ("0",)),
            ("0,,1", ("0",)),
            ("GPU-aa,MIG-bb", ("GPU-aa", "MIG-bb")),
        ],
    )
    def test_a_mask_is_read_as_cuda_reads_it(self, value: str, entries: tuple[str, ...]) -> None:
        assert parse_mask(value) == entries

    def test_hip_is_folded_into_cuda(self) -> None:
        assert read_mask({"HIP_VISIBLE_DEVICES": "0,1"}) == "0,1"
        both = {"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}
        assert read_mask(both) == "0,1"

    @pytest.mark.parametrize("cuda", ["1,0", ""])
    def test_hip_and_cuda_that_differ_are_an_error(self, cuda: str) -> None:
        with pytest.raises(ResourceError, match=r"HIP_VISIBLE_DEVICES='0,1'.*differ"):
            read_mask({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": cuda})

    @pytest.mark.parametrize("other", ["HIP", "CUDA"])
    def test_rocr_beside_another_is_an_error(self, other: str) -> None:
        with pytest.raises(ResourceError, match=f"ROCR_VISIBLE_DEVICES.*{other}_VISIBLE_DEVICES"):
            read_mask({"ROCR_VISIBLE_DEVICES": "0", f"{other}_VISIBLE_DEVICES": "0"})

    def test_rocr_alone_becomes_cuda(self) -> None:
        assert read_mask({"ROCR_VISIBLE_DEVICES": "2"}) == "2"

    def test_an_empty_hip_or_rocr_is_as_good_as_unset(self) -> None:
        empty = {"HIP_VISIBLE_DEVICES": "", "ROCR_VISIBLE_DEVICES": ""}
        assert read_mask(empty) is None
        assert read_mask({**empty, "CUDA_VISIBLE_DEVICES": "0"}) == "0"

    def test_a_pool_on_gpus_reports_contradicting_masks(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HIP_VISIBLE_DEVICES", "0")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        with pytest.raises(ResourceError, match="differ"):
            ResourcePool([1])
        assert ResourcePool([1], use_gpu=False).acquire("a") == (None,)


class TestVisible:
    def test_without_mask_and_driver_there_is_none(self) -> None:
        assert find_devices() == ()
        assert not ResourcePool([64]).use_gpu

    def test_without_a_driver_the_mask_is_believed(self, mask: SetMask) -> None:
        """The parent's mask is nested, not replaced.

        https://github.com/verl-project/verl/issues/589
        """
        mask("3")
        pool = ResourcePool([1])
        assert pool.use_gpu
        assert pool.acquire("a") == ("3",)

    def test_entries_are_passed_on_as_they_are(self, mask: SetMask) -> None:
        mask("GPU-1a,MIG-2b,7")
        assert ResourcePool([3]).acquire("a") == ("GPU-1a", "MIG-2b", "7")

    def test_without_driver_and_mask_devices_are_believed(self) -> None:
        pool = ResourcePool([2], devices=[5, "GPU-x"])
        assert pool.acquire("a") == ("5", "GPU-x")

    @pytest.mark.parametrize("value", ["", "-1"])
    def test_an_empty_mask_hides_what_nvml_lists(
        self, mask: SetMask, nvml: UseNvml, value: str
    ) -> None:
        nvml(2)
        mask(value)
        assert not ResourcePool([2]).use_gpu
        with pytest.raises(ResourceError, match="no GPU is visible"):
            ResourcePool([2], use_gpu=True)

    def test_without_a_mask_nvml_lists_them(self, nvml: UseNvml) -> None:
        fake = nvml(2)
        assert ResourcePool([2]).acquire("a") == ("0", "1")
        assert fake.open == 0

    def test_the_instances_of_a_divided_gpu_stand_for_it(self, nvml: UseNvml) -> None:
        nvml(2, {1: ["MIG-a", "MIG-b"]})
        assert ResourcePool([3]).acquire("a") == ("0", "MIG-a", "MIG-b")

    def test_an_entry_that_nvml_denies_is_refused_when_the_pool_is_built(
        self, mask: SetMask, nvml: UseNvml
    ) -> None:
        nvml(2)
        mask("0,7")
        with pytest.raises(ResourceError, match=r"'7' can't be used: NVML lists '0', '1'"):
            ResourcePool([1])
        mask(None)
        with pytest.raises(ResourceError, match="'GPU-ffff'"):
            ResourcePool([1], devices=["GPU-ffff"])

    def test_an_entry_outside_the_mask_is_refused_when_the_pool_is_built(
        self, mask: SetMask
    ) -> None:
        mask("0,1")
        with pytest.raises(ResourceError, match=r"'2' can't be used: CUDA_VISIBLE_DEVICES='0,1'"):
            ResourcePool([1], devices=["1", "2"])

    @pytest.mark.parametrize("entry", ["GPU-1111-abcd", "GPU-1", "MIG-GPU-1111-abcd/1/0", "1"])
    def test_every_way_to_name_a_device_is_known(self, nvml: UseNvml, entry: str) -> None:
        nvml(2)
        assert ResourcePool([1], devices=[entry]).acquire("a") == (entry,)

    def test_the_same_device_under_two_names_is_one_device(self, nvml: UseNvml) -> None:
        nvml(2)
        with pytest.raises(ResourceError, match="more than once"):
            ResourcePool([2], devices=["0", "GPU-0000-abcd"])
        ResourcePool([1], devices=["0"]).acquire("first")
        with pytest.raises(ResourceError, match="'first'"):
            ResourcePool([1], devices=["GPU-0"]).acquire("second")

    def test_a_device_named_twice_is_refused(self, mask: SetMask) -> None:
        mask("0,0")
        with pytest.raises(ResourceError, match="more than once"):
            ResourcePool([1])

    def test_a_broken_driver_is_no_driver(
        self, nvml: UseNvml, mask: SetMask, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = nvml(2)
        monkeypatch.setattr(fake, "nvmlDeviceGetCount", Mock(side_effect=OSError("mismatch")))
        assert find_devices() == ()
        assert fake.open == 0
        mask("9")
        assert ResourcePool([1]).acquire("a") == ("9",)

    def test_a_missing_binding_is_no_driver(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "pynvml", None)
        assert find_devices() == ()

    def test_use_gpu_false_asks_nobody(self, mask: SetMask) -> None:
        mask("0,0")
        assert ResourcePool([2], use_gpu=False).acquire("a") == (None, None)

    @pytest.mark.parametrize("devices", ["0", [0.0], [True], [""], ["0,1"], ["-1"], 3, {"0"}])
    def test_what_names_no_devices_is_refused(self, devices: Any) -> None:
        with pytest.raises(UsageError, match="devices"):
            ResourcePool([1], devices=devices)

    def test_devices_for_a_pool_on_cpus_are_refused(self) -> None:
        with pytest.raises(UsageError, match="contradict"):
            ResourcePool([1], use_gpu=False, devices=["0"])

    def test_more_processes_than_devices_are_refused_when_the_pool_is_built(
        self, mask: SetMask
    ) -> None:
        mask("0,1")
        ResourcePool([1]).acquire("actor")
        with pytest.raises(ResourceError, match=r"3 devices .* are 2.* Free: '1'; .*'actor': '0'"):
            ResourcePool([1, 2])
        pool = ResourcePool([2])
        with pytest.raises(ResourceError, match="3 devices"):
            pool.add_node(1)
        assert pool.store == [2]


class TestSharing:
    @pytest.fixture(autouse=True)
    def four_devices(self, mask: SetMask) -> None:
        mask("0,1,2,3")

    def test_two_pools_never_share_a_device(self) -> None:
        first, second = ResourcePool([2]), ResourcePool([2])
        assert second.acquire("b") == ("0", "1")
        assert first.acquire("a") == ("2", "3")

    def test_groups_of_one_pool_share_its_devices(self) -> None:
        pool = ResourcePool([2])
        assert pool.acquire("a") == pool.acquire("b") == pool.devices == ("0", "1")

    def test_nodes_of_one_machine_have_disjoint_devices(self) -> None:
        assert ResourcePool([2, 2]).acquire("a") == ("0", "1", "2", "3")

    def test_nothing_is_held_before_the_first_group_and_after_the_last(self) -> None:
        pool, other = ResourcePool([4]), ResourcePool([4])
        assert pool.devices == ()
        pool.acquire("a")
        pool.acquire("b")
        pool.release("a")
        with pytest.raises(ResourceError):
            other.acquire("c")
        pool.release("b")
        assert pool.devices == ()
        assert other.acquire("c") == ("0", "1", "2", "3")

    def test_the_error_says_what_is_free_and_who_holds_the_rest(self) -> None:
        actor, critic = ResourcePool([2]), ResourcePool([1])
        actor.acquire("actor")
        actor.acquire("ref")
        critic.acquire("critic")
        with pytest.raises(ResourceError) as caught:
            ResourcePool([2]).acquire("late")
        text = str(caught.value)
        assert "2 devices are needed and 1 are free" in text
        assert (
            "Free: '3'; held by groups 'actor', 'ref': '0', '1'; held by group 'critic': '2'"
            in text
        )

    def test_a_refused_group_takes_nothing(self) -> None:
        ResourcePool([3]).acquire("a")
        with pytest.raises(ResourceError):
            merge_resource_pool(ResourcePool([1]), ResourcePool([1])).acquire("b")
        assert ResourcePool([1]).acquire("c") == ("3",)

    def test_max_colocate_count_groups_share_a_pool(self) -> None:
        pool = ResourcePool([1], max_colocate_count=2)
        pool.acquire("a")
        pool.acquire("b")
        with pytest.raises(ResourceError, match=r"max_colocate_count=2 .*groups 'a', 'b'"):
            pool.acquire("c")
        pool.release("a")
        pool.acquire("c")

    def test_groups_of_one_name_count_each(self) -> None:
        pool = ResourcePool([4])
        pool.acquire("a")
        pool.acquire("a")
        pool.release("a")
        assert pool.devices
        pool.release("a")
        assert not pool.devices

    def test_releasing_what_is_not_held_changes_nothing(self) -> None:
        pool = ResourcePool([1])
        pool.release("a")
        pool.acquire("a")
        pool.release("b")
        ResourcePool([1]).release("a")
        assert pool.devices == ("0",)

    def test_named_devices_are_taken_where_they_are_free(self) -> None:
        ResourcePool([1], devices=["2"]).acquire("a")
        pool = ResourcePool([2], devices=["3", "2", "1"])
        assert pool.acquire("b") == ("3", "1")

    def test_pools_on_cpus_have_no_limit(self) -> None:
        pool = ResourcePool([100], max_colocate_count=1, use_gpu=False)
        for name in "abc":
            assert pool.acquire(name) == (None,) * 100
        assert pool.devices == ()

    def test_an_empty_pool_takes_no_group(self) -> None:
        with pytest.raises(ResourceError, match="no process"):
            ResourcePool().acquire("a")

    def test_no_node_is_added_while_a_group_runs(self) -> None:
        pool = ResourcePool([1])
        pool.acquire("a")
        with pytest.raises(UsageError, match="used by group 'a'"):
            pool.add_node(1)
        pool.release("a")
        pool.add_node(1)
        assert pool.acquire("a") == ("0", "1")

    def test_repr_tells_the_state(self) -> None:
        pool = ResourcePool([1, 1])
        assert repr(pool) == "ResourcePool([1, 1]; GPUs; idle)"
        pool.acquire("a")
        assert repr(pool) == "ResourcePool([1, 1]; GPUs; holds '0', '1'; group 'a')"
        cpus = ResourcePool([2], use_gpu=False)
        cpus.acquire("b")
        cpus.acquire("c")
        assert repr(cpus) == "ResourcePool([2]; CPUs; groups 'b', 'c')"


def test_a_forked_child_holds_nothing_and_its_parent_still_does() -> None:
    """In a process of its own: this one may have threads, and those make forking a gamble."""
    code = """if True:
        import os
        from asyncwg.resource_pool import ResourcePool
        pool = ResourcePool([2])
        pool.acquire("a")
        child = os.fork()
        if child == 0:
            free = pool.devices == () and ResourcePool([2]).acquire("b") == ("0", "1")
            os._exit(0 if free else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert pool.devices == ("0", "1")
    """
    # The mask is believed where there is no driver to ask.
    code = "import sys; sys.modules['pynvml'] = None\n" + code
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environ, timeout=60)


class TestSplitAndMerge:
    @pytest.fixture(autouse=True)
    def eight_devices(self, mask: SetMask) -> None:
        mask("0,1,2,3,4,5,6,7")

    def test_an_int_is_the_size_of_each_part(self) -> None:
        parts = split_resource_pool(ResourcePool([6]), 2)
        assert [part.store for part in parts] == [[2], [2], [2]]

    def test_a_list_has_the_size_of_each_part(self) -> None:
        parts = split_resource_pool(ResourcePool([6]), [1, 5])
        assert [part.world_size for part in parts] == [1, 5]

    def test_parts_have_disjoint_devices_and_hold_them_together(self) -> None:
        pool = ResourcePool([4])
        first, second = split_resource_pool(pool, 2)
        assert second.acquire("b") == ("2", "3")
        assert ResourcePool([4]).acquire("other") == ("4", "5", "6", "7")
        assert first.acquire("a") == ("0", "1")
        assert pool.acquire("whole") == ("0", "1", "2", "3")

    def test_a_part_spans_nodes_and_counts_its_own_ranks(self) -> None:
        """A window of verl's has the numbers of the whole pool's first node."""
        first, second = split_resource_pool(ResourcePool([2, 2]), [1, 3])
        assert (first.store, second.store) == ([1], [1, 2])
        assert second.local_world_size_list() == [1, 2, 2]
        assert second.local_rank_list() == [0, 0, 1]
        assert second.acquire("a") == ("1", "2", "3")

    def test_a_part_is_split_again(self) -> None:
        _, half = split_resource_pool(ResourcePool([8]), 4)
        quarters = split_resource_pool(half, [3, 1])
        assert [quarter.acquire("a") for quarter in quarters] == [("4", "5", "6"), ("7",)]

    def test_places_are_counted_each_for_itself_against_max_colocate_count(self) -> None:
        pool = ResourcePool([2], max_colocate_count=1)
        first, second = split_resource_pool(pool, 1)
        first.acquire("a")
        second.acquire("b")
        with pytest.raises(ResourceError, match="in use by groups 'a', 'b'"):
            pool.acquire("c")
        first.release("a")
        second.release("b")
        pool.acquire("c")
        with pytest.raises(ResourceError, match="group 'c'"):
            first.acquire("a")

    def test_a_part_does_not_release_for_another(self) -> None:
        first, second = split_resource_pool(ResourcePool([2]), 1)
        first.acquire("a")
        second.release("a")
        assert first.devices == ("0",)

    @pytest.mark.parametrize("size", [3, 8, [2, 1], [2, 3], []])
    def test_sizes_that_do_not_fit_are_refused(self, size: int | Sequence[int]) -> None:
        with pytest.raises(UsageError, match="4 processes"):
            split_resource_pool(ResourcePool([4]), size)

    @pytest.mark.parametrize("size", [0, -1, 2.0, True, "2", [2, 0, 2], [4.0], None])
    def test_sizes_that_are_no_counts_are_refused(self, size: Any) -> None:
        with pytest.raises(UsageError, match="split_size"):
            split_resource_pool(ResourcePool([4]), size)

    def test_only_pools_are_split_and_merged(self) -> None:
        wrong: Any = [4]
        with pytest.raises(UsageError, match="ResourcePool is needed"):
            split_resource_pool(wrong, 2)
        with pytest.raises(UsageError, match="ResourcePool is needed"):
            merge_resource_pool(ResourcePool([4]), wrong)

    def test_a_merged_pool_has_the_nodes_and_devices_of_both(self) -> None:
        first, second = ResourcePool([2, 1]), ResourcePool([2])
        merged = merge_resource_pool(second, first)
        assert merged.store == [2, 2, 1]
        first.acquire("a")
        assert merged.acquire("m") == ("3", "4", "0", "1", "2")
        assert second.acquire("b") == ("3", "4")
        first.release("a")
        assert first.devices == ("0", "1", "2")

    def test_parts_of_one_node_are_merged_to_one_node(self) -> None:
        first, second, third = split_resource_pool(ResourcePool([3]), 1)
        merged = merge_resource_pool(merge_resource_pool(first, second), third)
        assert merged.store == [3]
        assert merged.acquire("a") == ("0", "1", "2")

    def test_a_merged_pool_is_split_again(self) -> None:
        merged = merge_resource_pool(ResourcePool([1]), ResourcePool([3]))
        parts = split_resource_pool(merged, 2)
        assert [part.store for part in parts] == [[1, 1], [2]]
        assert [part.acquire("a") for part in parts] == [("0", "1"), ("2", "3")]

    def test_pools_with_ranks_in_common_are_not_merged(self) -> None:
        pool = ResourcePool([4])
        with pytest.raises(UsageError, match="in common"):
            merge_resource_pool(pool, split_resource_pool(pool, 2)[0])

    @pytest.mark.parametrize(
        "other",
        [{"use_gpu": False}, {"max_colocate_count": 3}, {"n_gpus_per_node": 4}],
    )
    def test_pools_that_differ_are_not_merged(self, other: dict[str, Any]) -> None:
        with pytest.raises(UsageError, match=f"differ in {next(iter(other))}"):
            merge_resource_pool(ResourcePool([1]), ResourcePool([1], **other))

    def test_a_pool_made_of_others_takes_no_node(self) -> None:
        part, _ = split_resource_pool(ResourcePool([2]), 1)
        with pytest.raises(UsageError, match="split or merged"):
            part.add_node(1)

    @given(
        nodes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
        cuts=st.lists(st.integers(1, 15), max_size=4),
    )
    def test_parts_put_together_are_the_whole(self, nodes: list[int], cuts: list[int]) -> None:
        pool = ResourcePool(nodes, use_gpu=False)
        ends = sorted({cut for cut in cuts if cut < pool.world_size} | {pool.world_size})
        starts = [0, *ends[:-1]]
        parts = split_resource_pool(pool, [e - s for s, e in zip(starts, ends, strict=True)])
        assert sum((part.places for part in parts), ()) == pool.places
        whole = parts[0]
        for part in parts[1:]:
            whole = merge_resource_pool(whole, part)
        assert whole.store == nodes
        assert all(sum(part.store) == part.world_size for part in parts)


class TestManager:
    def test_roles_get_the_pools_they_are_mapped_to(self, mask: SetMask) -> None:
        mask("0,1,2,3")
        manager = ResourcePoolManager(
            resource_pool_spec={"train": [2], "rollout": [1, 1]},
            mapping={"actor": "train", "ref": "train", 7: "rollout"},
        )
        manager.create_resource_pool()
        assert list(manager.resource_pool_dict) == ["train", "rollout"]
        assert manager.get_resource_pool("actor") is manager.get_resource_pool("ref")
        assert manager.get_resource_pool(7).store == [1, 1]
        assert manager.get_n_gpus() == 4

    def test_pools_are_built_once(self) -> None:
        manager = ResourcePoolManager({"train": [2]}, {"actor": "train"})
        manager.create_resource_pool()
        pool = manager.get_resource_pool("actor")
        manager.create_resource_pool()
        assert manager.get_resource_pool("actor") is pool

    def test_pools_that_do_not_fit_together_are_refused(self, mask: SetMask) -> None:
        mask("0,1,2")
        manager = ResourcePoolManager({"a": [2], "b": [2]}, {})
        with pytest.raises(ResourceError, match=r"4 devices .* are 3"):
            manager.create_resource_pool()
        assert manager.resource_pool_dict == {}

    def test_options_reach_every_pool(self, mask: SetMask) -> None:
        mask("0")
        manager = ResourcePoolManager({"a": [9]}, {}, max_colocate_count=2, use_gpu=False)
        manager.create_resource_pool()
        assert manager.resource_pool_dict["a"].max_colocate_count == 2
        assert not manager.resource_pool_dict["a"].use_gpu

    def test_a_role_of_no_pool_is_refused(self) -> None:
        with pytest.raises(UsageError, match="'actor' is mapped to the pool 'trian'"):
            ResourcePoolManager({"train": [1]}, {"actor": "trian"})

    def test_an_unknown_role_is_refused_with_the_known_ones(self) -> None:
        manager = ResourcePoolManager({"train": [1]}, {"actor": "train"})
        with pytest.raises(UsageError, match=r"no role 'critic' .* 'actor'"):
            manager.get_resource_pool("critic")

    def test_a_pool_before_they_are_built_is_refused(self) -> None:
        manager = ResourcePoolManager({"train": [1]}, {"actor": "train"})
        with pytest.raises(UsageError, match="create_resource_pool"):
            manager.get_resource_pool("actor")


def test_counting_devices_imports_neither_torch_nor_numpy() -> None:
    code = (
        "import sys, asyncwg.resource_pool as p; p.ResourcePool([1]).acquire('a'); "
        "sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
