"""The system calls that a command of a sandbox does without, as a seccomp filter for the kernel.

A command has no capability and no namespace of its own making, so most of these would fail anyway. Some would not: the kernel's
keyrings and the sockets of a virtual machine know no namespaces, `io_uring` is asked past any filter, and a file of
`memfd_create` counts nowhere unless a control group holds the memory. The kernel answers them as if it lacked them (ENOSYS), so
that programs fall back. Programs of another architecture (32-bit ones on x86-64) get that answer to everything, since their
numbers are others.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

REFUSED = (
    *("add_key", "request_key", "keyctl"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register"),
    *("bpf", "perf_event_open", "userfaultfd", "fanotify_init", "open_by_handle_at"),
    *("mount", "umount2", "pivot_root", "chroot", "open_tree", "move_mount", "mount_setattr"),
    *("fsopen", "fsconfig", "fsmount", "fspick", "unshare", "setns"),
    *("init_module", "finit_module", "delete_module", "kexec_load", "kexec_file_load", "reboot"),
    *("swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "syslog", "settimeofday", "clock_settime"),
    *("iopl", "ioperm", "modify_ldt"),
)
UNCOUNTED = ("memfd_create", "memfd_secret")
"""Refused as well where memory is sampled: what they hold need not be mapped by anybody."""
FAMILIES = (1, 2, 10, 16)
"""Sockets that may be made: unix, inet, inet6, netlink (which tells a program its addresses)."""

_LATE = {
    "io_uring_setup": 425, "io_uring_enter": 426, "io_uring_register": 427, "open_tree": 428, "move_mount": 429,
    "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "mount_setattr": 442, "quotactl_fd": 443,
    "memfd_secret": 447,
}  # fmt: skip
_X86_64 = _LATE | {
    "ioctl": 16, "socket": 41, "socketpair": 53, "syslog": 103, "modify_ldt": 154, "pivot_root": 155, "chroot": 161,
    "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "swapoff": 168, "reboot": 169,
    "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176, "quotactl": 179, "clock_settime": 227,
    "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272, "perf_event_open": 298,
    "fanotify_init": 300, "open_by_handle_at": 304, "setns": 308, "finit_module": 313, "memfd_create": 319,
    "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323,
}  # fmt: skip
_GENERIC = _LATE | {
    "ioctl": 29, "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "quotactl": 60, "acct": 89, "unshare": 97,
    "kexec_load": 104, "init_module": 105, "delete_module": 106, "clock_settime": 112, "syslog": 116, "reboot": 142,
    "settimeofday": 170, "socket": 198, "socketpair": 199, "add_key": 217, "request_key": 218, "keyctl": 219,
    "swapon": 224, "swapoff": 225, "perf_event_open": 241, "fanotify_init": 262, "open_by_handle_at": 265, "setns": 268,
    "finit_module": 273, "memfd_create": 279, "bpf": 280, "userfaultfd": 282, "kexec_file_load": 294,
}  # fmt: skip
MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _GENERIC), "riscv64": (0xC00000F3, _GENERIC)}
"""The kernel's number of an architecture (AUDIT_ARCH_*), and those of its system calls."""

# Instructions of the classic packet filter, and where they find things in a struct seccomp_data (little-endian).
_LOAD, _EQUAL, _AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT, _SECOND_ARGUMENT = 0, 4, 16, 24
_ALLOW, _ERROR = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS, _EAFNOSUPPORT = 1, 38, 97
_X32_BIT = 0x40000000
_Instruction = tuple[int, int, str, str]
"""What to do, with which value, and where to go on if it is so and if it is not (empty is the next one)."""
_TERMINAL_INPUT = (0x5412, 0x541C)
"""ioctl TIOCSTI and TIOCLINUX: they type into the terminal of whoever started us."""


def refusal(machine: str, names: Sequence[str]) -> bytes:
    """A filter (array of struct sock_filter) that refuses these calls, foreign socket families and foreign architectures.

    `machine`: as `os.uname()` names it. Raises KeyError for one whose numbers are not known.
    """
    architecture, numbers = MACHINES[machine]
    refused = sorted(numbers[name] for name in names if name in numbers)
    # Every jump counts the instructions that it passes over; the answers come last, in this order.
    answers = {
        "allow": _ALLOW,
        "lacking": _ERROR | _ENOSYS,
        "family": _ERROR | _EAFNOSUPPORT,
        "permission": _ERROR | _EPERM,
    }
    families: list[_Instruction] = [
        (_LOAD, _FIRST_ARGUMENT, "", ""),
        *((_EQUAL, family, "allow", "") for family in FAMILIES[:-1]),
        (_EQUAL, FAMILIES[-1], "allow", "family"),
    ]
    numbered: list[_Instruction] = [
        (_LOAD, _ARCHITECTURE, "", ""),
        (_EQUAL, architecture, "", "lacking"),
        (_LOAD, _NUMBER, "", ""),
        (_AT_LEAST, _X32_BIT, "lacking", ""),
        (_EQUAL, numbers["socket"], "families", ""),
        (_EQUAL, numbers["socketpair"], "families", ""),
        (_EQUAL, numbers["ioctl"], "ioctl", ""),
        (_AT_LEAST, refused[0], "", "allow"),  # the usual ones (read, write, open) are the lowest: they go no further
        *((_EQUAL, number, "lacking", "") for number in refused[:-1]),
        (_EQUAL, refused[-1], "lacking", "allow"),
    ]
    program = [
        *numbered,
        *families,
        (_LOAD, _SECOND_ARGUMENT, "", ""),
        (_EQUAL, _TERMINAL_INPUT[0], "permission", ""),
        (_EQUAL, _TERMINAL_INPUT[1], "permission", "allow"),
    ]
    places = {"families": len(numbered), "ioctl": len(numbered) + len(families)}
    places |= {name: len(program) + index for index, name in enumerate(answers)}

    def passed_over(label: str, here: int) -> int:
        return places[label] - here - 1 if label else 0

    code = [
        struct.pack("<HBBI", kind, passed_over(true, here), passed_over(false, here), value)
        for here, (kind, value, true, false) in enumerate(program)
    ]
    return b"".join(code + [struct.pack("<HBBI", _RETURN, 0, 0, answer) for answer in answers.values()])
