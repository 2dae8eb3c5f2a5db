import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.errors import UsageError
from engine.launch.fabric import (
    communicator_bytes,
    interface_addresses,
    plan_environment,
    up_interfaces,
)
from engine.launch.ports import ephemeral_ports, free_range, parse_ports, ports_in_use

MIB = 1 << 20
HOST, NPU = "HCCL_HOST_SOCKET_PORT_RANGE", "HCCL_NPU_SOCKET_PORT_RANGE"
USERS = {
    "HCCL_IF_BASE_PORT": "50000",
    HOST: "auto",
    NPU: "61000,61050-61100",
    "HCCL_CONNECT_TIMEOUT": "7200",
    "HCCL_BUFFSIZE": "7",
    "HCCL_DETERMINISTIC": "strict",
    "HCCL_SOCKET_IFNAME": "^docker",
    "HCCL_IF_IP": "10.0.0.1",
    "NCCL_SOCKET_IFNAME": "eth",
    "GLOO_SOCKET_IFNAME": "eth0",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def plan(**changes: Any) -> tuple[dict[str, str], list[str]]:
    arguments: dict[str, Any] = {
        "transport": "hccl",
        "collectives": None,
        "ranks": 16,
        "window_bytes": 10 * MIB,
        "environ": {},
        "interfaces": ["lo", "eth0"],
        "ports": set(),
        "ephemeral": range(32768, 61000),
        "seed": 0,
    }
    return plan_environment(**{**arguments, **changes})


def test_shared_memory_needs_nothing() -> None:
    assert plan(transport="shm") == ({}, [])


def test_gloo_alone_gets_an_interface_and_no_more() -> None:
    assert plan(transport="gloo") == ({"GLOO_SOCKET_IFNAME": "lo"}, [])
    assert plan(transport="gloo", interfaces=["eth1", "eth0"])[0] == {"GLOO_SOCKET_IFNAME": "eth0"}
    assert plan(transport="gloo", interfaces=[])[0] == {}


def test_several_nodes_take_the_interface_of_their_address() -> None:
    addresses = {
        "lo": ["127.0.0.1"],
        "ib0": ["10.1.0.1", "fd00::1", "fe80::2%ib0"],
        "b": ["10.1.0.11"],
    }
    for address in ("10.1.0.1", "FD00:0:0::1", "fe80::2", "fe80::2%3"):
        values, _ = plan(transport="gloo", address=address, addresses=addresses)
        assert values == {"GLOO_SOCKET_IFNAME": "ib0"}
    values, _ = plan(collectives="nccl", address="10.1.0.11", addresses=addresses)
    assert (values["HCCL_SOCKET_IFNAME"], values["NCCL_SOCKET_IFNAME"]) == ("=b", "=b")
    assert not any("FAMILY" in name for name in values)
    values, _ = plan(collectives="nccl", address="fd00::1", addresses=addresses)
    assert values["HCCL_SOCKET_FAMILY"] == values["NCCL_SOCKET_FAMILY"] == "AF_INET6"
    assert plan(transport="gloo", address="", addresses=addresses) == ({}, [])
    assert plan(transport="gloo")[0] == {"GLOO_SOCKET_IFNAME": "lo"}


def test_an_address_that_no_interface_has() -> None:
    given = {"transport": "gloo", "address": "10.0.0.9", "addresses": {"eth0": ["10.0.0.1"]}}
    with pytest.raises(
        UsageError, match=r"no network interface here has .* 10\.0\.0\.9; set GLOO_"
    ):
        plan(**given)
    assert plan(**given, environ={"GLOO_SOCKET_IFNAME": "eth7"})[0] == {
        "GLOO_SOCKET_IFNAME": "eth7"
    }


def test_interfaces_have_their_addresses() -> None:
    found = interface_addresses()
    assert found["lo"][0] == "127.0.0.1"
    assert found.keys() == set(up_interfaces())


def test_tensor_parallel_groups_count_where_the_transport_needs_nothing() -> None:
    assert "GLOO_SOCKET_IFNAME" in plan(transport="shm", collectives="gloo")[0]
    assert plan(transport="hccl")[0].get("HCCL_DETERMINISTIC") is None
    assert plan(transport="hccl", collectives="hccl")[0]["HCCL_DETERMINISTIC"] == "true"


def test_nccl_gets_a_queue_for_each_stream() -> None:
    values, _ = plan(transport="nccl")
    assert values == {"NCCL_SOCKET_IFNAME": "=lo", "CUDA_DEVICE_MAX_CONNECTIONS": "32"}


def test_hccl_is_planned_whole() -> None:
    values, notes = plan(connect_timeout_s=450.5)
    assert values == {
        "HCCL_SOCKET_IFNAME": "=lo",
        HOST: "61000-61031",
        "HCCL_IF_BASE_PORT": "61000",
        NPU: "61032-61063",
        "HCCL_CONNECT_TIMEOUT": "451",
        "HCCL_BUFFSIZE": "11",
        "P2P_HCCL_BUFFSIZE": "11",
    }
    assert notes == []


def test_two_instances_that_start_at_once_look_at_different_ports() -> None:
    first, second = (parse_ports(plan(seed=seed)[0][HOST]) for seed in (1, 2))
    assert first and second and not set(first[0]) & set(second[0])


def test_the_timeout_is_above_the_skew_of_loading_and_within_what_hccl_takes() -> None:
    for wanted, load, seconds in (
        (1.0, 0, 120),
        (300.0, 0, 300),
        (300.0, 82 * 10**9, 820),
        (7200.0, 10**15, 7200),
    ):
        values, notes = plan(connect_timeout_s=wanted, load_bytes=load)
        assert values["HCCL_CONNECT_TIMEOUT"] == str(seconds)
        assert any(f"wait {seconds} s" in note for note in notes) == (seconds > wanted)


@given(
    transport=st.sampled_from(["gloo", "nccl", "hccl"]),
    collectives=st.sampled_from([None, "gloo", "nccl", "hccl"]),
    ranks=st.integers(1, 480),
    window_bytes=st.integers(0, 1 << 34),
    connect_timeout_s=st.floats(1, 7200),
    load_bytes=st.integers(0, 10**13),
    ports=st.sets(st.integers(1, 65535), max_size=300),
    ephemeral=st.tuples(st.integers(0, 65535), st.integers(0, 65536)).map(lambda at: range(*at)),
    seed=st.integers(0, 1 << 22),
    own=st.sets(st.sampled_from(sorted(USERS))),
)
def test_any_plan_keeps_the_limits_of_hccl_and_what_the_user_has_set(
    ports: set[int], window_bytes: int, own: set[str], ranks: int, **topology: Any
) -> None:
    environ = {name: USERS[name] for name in own}
    arguments = {"ports": ports, "window_bytes": window_bytes, "ranks": ranks, **topology}
    try:
        values, notes = plan(environ=environ, **arguments)
    except UsageError as error:
        assert "ports in a row are free" in str(error)
        return
    assert (values, notes) == plan(environ=environ, **arguments)  # one for every rank
    for name in own & values.keys():
        assert values[name] == USERS[name]
        assert f"{name}={USERS[name]} is kept, as your environment has it" in notes
    if "hccl" not in (topology["transport"], topology["collectives"]):
        assert not any(name.startswith("HCCL") for name in values)
        return
    planned = {}
    for name in {HOST, NPU} - own:
        if name in values:
            (planned[name],) = parse_ports(values[name]) or ()
    for found in planned.values():
        assert 1024 <= found.start < found.stop <= 65536
        assert not ports & set(found)
    if len(planned) == 2:
        assert not set(planned[HOST]) & set(planned[NPU])
        assert len(planned[HOST]) >= ranks
        assert int(values["HCCL_IF_BASE_PORT"]) in planned[HOST]
        assert int(values["HCCL_IF_BASE_PORT"]) <= 65504
    assert 120 <= int(values["HCCL_CONNECT_TIMEOUT"]) <= 7200
    assert int(values["HCCL_CONNECT_TIMEOUT"]) >= math.ceil(topology["connect_timeout_s"])
    if "HCCL_BUFFSIZE" not in own:
        assert int(values["HCCL_BUFFSIZE"]) * MIB > window_bytes
    if own & {"HCCL_IF_BASE_PORT", HOST}:  # a range of ours would go before the user's base port
        assert not ({"HCCL_IF_BASE_PORT", HOST} - own) & values.keys()


def test_a_base_port_of_the_users_is_not_overruled_by_a_range() -> None:
    values, notes = plan(environ={"HCCL_IF_BASE_PORT": "61000"}, ports={61015})
    assert HOST not in values
    assert values[NPU] == "61032-61063"
    assert "HCCL_IF_BASE_PORT: port 61015 is in use" in notes[-1]


def test_an_address_of_the_users_goes_before_an_interface() -> None:
    assert "HCCL_SOCKET_IFNAME" not in plan(environ={"HCCL_IF_IP": "10.0.0.1"})[0]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HCCL_IF_BASE_PORT", "65521"),
        ("HCCL_IF_BASE_PORT", "1023"),
        ("HCCL_IF_BASE_PORT", "auto"),
        (HOST, "61000-65536"),
        (HOST, "61000-61050,61050"),
        (NPU, ""),
        ("HCCL_CONNECT_TIMEOUT", "119"),
        ("HCCL_CONNECT_TIMEOUT", "300.5"),
        ("HCCL_BUFFSIZE", "0"),
        ("HCCL_BUFFSIZE", "200M"),
    ],
)
def test_values_that_hccl_would_refuse_are_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"^{name}={value}: "):
        plan(environ={name: value})


def test_a_small_buffer_and_a_port_in_use_are_the_users_choice_but_said() -> None:
    values, notes = plan(environ={"HCCL_BUFFSIZE": "5", HOST: "60000-60050"}, ports={60001, 60002})
    assert (values["HCCL_BUFFSIZE"], values[HOST]) == ("5", "60000-60050")
    assert any("less than a message (10 MiB)" in note for note in notes)
    assert any("port 60001 is in use" in note for note in notes)


def test_without_free_ports_the_remedy_is_said() -> None:
    with pytest.raises(UsageError, match="no 32 TCP ports in a row are free"):
        plan(ports=set(range(1024, 65536, 20)))


def test_free_ports_are_outside_of_what_the_system_gives_out_while_there_is_room() -> None:
    system = range(32768, 61000)
    assert free_range(10, set(), system, 0) == range(61000, 61010)
    assert free_range(10, set(range(61000, 65536)), system, 0) == range(16384, 16394)
    assert free_range(10, set(range(16384, 32768)) | set(range(61000, 65536)), system, 0) == range(
        1024, 1034
    )
    assert free_range(10, {61004}, system, 0) == range(61005, 61015)
    # From the last place it goes on at the first one.
    assert free_range(10, {65535}, system, 452) == range(65520, 65530)
    assert free_range(10, set(range(65500, 65536)), system, 452) == range(61000, 61010)


def test_memory_of_a_communicator() -> None:
    sizes = {"HCCL_BUFFSIZE": "15", "P2P_HCCL_BUFFSIZE": "17"}
    assert communicator_bytes("hccl", sizes) == 34 * MIB  # the larger: which one counts differs
    assert communicator_bytes("hccl", {}) == 400 * MIB
    assert communicator_bytes("nccl", {}) == 544 * MIB
    assert communicator_bytes("nccl", {"NCCL_BUFFSIZE": str(MIB)}) == 448 * MIB
    assert communicator_bytes("nccl", {"NCCL_MAX_CTAS": "2"}) == 34 * MIB
    assert communicator_bytes("gloo", {}) == communicator_bytes("shm", {}) == 0
    with pytest.raises(UsageError, match="NCCL_BUFFSIZE=4M"):
        communicator_bytes("nccl", {"NCCL_BUFFSIZE": "4M"})


def test_ports_are_read_from_proc(tmp_path: Path) -> None:
    net = tmp_path / "proc/net"
    net.mkdir(parents=True)
    (net / "tcp").write_text(
        "  sl  local_address rem_address   st\n"
        "   0: 00000000:07E8 00000000:0000 0A 0\n"
        "   1: 0100007F:EE48 0100007F:B209 06 0\n"
    )
    (net / "tcp6").write_text(f"  sl\n   0: {'0' * 32}:1F40 {'0' * 32}:0000 0A 0\n")
    assert ports_in_use(tmp_path) == {2024, 61000, 8000}
    assert ports_in_use(tmp_path / "nothing") == frozenset()
    setting = tmp_path / "proc/sys/net/ipv4/ip_local_port_range"
    setting.parent.mkdir(parents=True)
    setting.write_text("1024\t65535\n")
    assert ephemeral_ports(tmp_path) == range(1024, 65536)
    assert ephemeral_ports(tmp_path / "nothing") == range(32768, 61000)


def test_this_machine_can_be_planned_for() -> None:
    values, _ = plan_environment(
        transport="hccl", collectives=None, ranks=2, window_bytes=1, environ={}
    )
    assert parse_ports(values[HOST])


def test_a_value_that_hccl_or_gloo_cannot_take_is_told() -> None:
    with pytest.raises(UsageError, match="HCCL_DETERMINISTIC=maybe: must be true, false or strict"):
        plan(transport="hccl", collectives="hccl", environ={"HCCL_DETERMINISTIC": "maybe"})
    _, notes = plan(transport="gloo", environ={"GLOO_SOCKET_IFNAME": "nosuch"})
    assert "GLOO_SOCKET_IFNAME=nosuch: no such interface is up here" in notes
