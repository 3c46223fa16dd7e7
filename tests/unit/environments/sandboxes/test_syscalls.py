"""The filter of system calls, run by an interpreter of the kernel's packet filter: also for machines that the tests do not run on."""

import errno
import struct

import pytest

from everlong.environments.sandboxes.syscalls import FAMILIES, MACHINES, REFUSED, UNCOUNTED, refusal

ALLOWED = "allowed"


def answer(program, number, architecture, first=0, second=0):
    """What the kernel does with this call: "allowed", or the number of its error."""
    data = struct.pack("<iIQQQ", number, architecture, 0, first, second)
    accumulator, here = 0, 0
    while True:
        kind, true, false, value = struct.unpack_from("<HBBI", program, 8 * here)
        here += 1
        if kind == 0x20:
            (accumulator,) = struct.unpack_from("<I", data, value)
        elif kind == 0x15:
            here += true if accumulator == value else false
        elif kind == 0x35:
            here += true if accumulator >= value else false
        else:
            assert kind == 0x06
            return ALLOWED if value == 0x7FFF0000 else value & 0xFFFF


@pytest.mark.parametrize("machine", MACHINES)
def test_the_named_calls_are_refused_and_every_other_number_is_not(machine):
    architecture, numbers = MACHINES[machine]
    program = refusal(machine, REFUSED)
    refused = {numbers[name] for name in REFUSED if name in numbers}
    asked_further = {numbers[name] for name in ("socket", "socketpair", "ioctl")}
    for number in set(range(500)) - asked_further:
        assert answer(program, number, architecture) == (errno.ENOSYS if number in refused else ALLOWED), number


@pytest.mark.parametrize("machine", MACHINES)
def test_sockets_of_the_usual_families_only(machine):
    architecture, numbers = MACHINES[machine]
    program = refusal(machine, REFUSED)
    for name in ("socket", "socketpair"):
        for family in range(50):
            expected = ALLOWED if family in FAMILIES else errno.EAFNOSUPPORT
            assert answer(program, numbers[name], architecture, first=family) == expected, (name, family)


@pytest.mark.parametrize("machine", MACHINES)
def test_nobody_types_into_a_terminal(machine):
    architecture, numbers = MACHINES[machine]
    program = refusal(machine, REFUSED)
    said = [answer(program, numbers["ioctl"], architecture, second=command) for command in (0x5401, 0x5412, 0x541C)]
    assert said == [ALLOWED, errno.EPERM, errno.EPERM]


def test_other_architectures_get_no_call_through():
    program = refusal("x86_64", REFUSED)
    i386, x86_64, x32_bit = 0x40000003, 0xC000003E, 0x40000000
    assert answer(program, 0, x86_64) == ALLOWED
    assert answer(program, 0, i386) == answer(program, x32_bit, x86_64) == errno.ENOSYS


def test_what_no_control_group_counts_is_refused_only_where_asked():
    architecture, numbers = MACHINES["x86_64"]
    number = numbers["memfd_create"]
    assert answer(refusal("x86_64", REFUSED), number, architecture) == ALLOWED
    assert answer(refusal("x86_64", REFUSED + UNCOUNTED), number, architecture) == errno.ENOSYS
