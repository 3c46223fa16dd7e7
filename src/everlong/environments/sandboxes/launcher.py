"""Runs one command of a sandbox and reports how it ended: `python3 -I -S launcher.py` with a request on standard input.

With a folder as argument it says how much lies in it: bytes, names, bytes of the longest path.

A program of its own, standard library only (even the system's Python runs it), started anew for every command:

    manager -> launcher -> init -> command          isolation "namespaces": init is process 1 of a pid namespace
    manager -> launcher ---------> command          isolation "none": the launcher adopts orphans (a "subreaper")
    manager -> runsc -> launcher -> init -> command isolation "guest": all but runsc inside a sandbox of gVisor

The last one before the command supervises it: collects output, watches time, memory, processes and disk, and when the command
ends for whatever reason kills everything it started. It also stops when standard input closes: the manager closed the sandbox
or is dead. A `p` there makes everything stand still, time limit included, until a `c`. In namespaces the command runs as a user
without any capability, in a user namespace below init's, so that it can neither undo a mount nor make namespaces of its own. It
may have init's user, so init takes no signal from it: the first process of a namespace gets only those that it asks for.

Request: 4 bytes of length, then a marshalled dict (json would cost a third of the start-up time). Reply on standard output:
`done EXIT TIMED_OUT TRUNCATED MEMORY_EXCEEDED ELAPSED_US`, a newline and the output; or `failed TEXT`; nothing when stopped.
"""

import ctypes
import marshal
import os
import select
import sys
import time

NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET = (
    0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000,
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND, MS_REC, MS_PRIVATE = 2, 4, 8, 0x1000, 0x4000, 0x40000
MNT_DETACH = 2
ATTR_RDONLY, ATTR_NOSUID, ATTR_NODEV = 1, 2, 4
AT_RECURSIVE = 0x8000
SYS_MOUNT_SETATTR = 442
SYS_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41, "riscv64": 41}
PR_SET_PDEATHSIG, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 22, 24, 36, 38
SECCOMP_FILTER = 2
SYS_KEYCTL = {"x86_64": 250, "aarch64": 219, "riscv64": 219}
JOIN_SESSION_KEYRING = 1
SYS_LANDLOCK_CREATE, SYS_LANDLOCK_ADD, SYS_LANDLOCK_RESTRICT = 444, 445, 446
LANDLOCK_SCOPES_SINCE = 6
LANDLOCK_WRITES, LANDLOCK_FILE_WRITES, LANDLOCK_MAKES_DEVICE = 0x7FF2, 0x4002, 0x0840
LANDLOCK_SCOPES = 3
RLIMIT_FSIZE, RLIMIT_CORE, RLIMIT_NPROC, RLIMIT_NOFILE = 1, 4, 6, 7
SIGINT, SIGKILL, SIGPIPE, SIGTERM, SIGCHLD, SIGCONT, SIGSTOP, SIGXFSZ = 2, 9, 13, 15, 17, 18, 19, 25
SIG_BLOCK, SIG_SETMASK = 0, 2

INNER_ID = 1000
"""The user and group that commands run as, seen from inside."""
SAMPLE_S = 0.1
"""Memory and processes are looked at this often: what a command can grow within it is the overshoot."""
DISK_SAMPLE_S = 1.0
SHM_BYTES = 64 << 20
SHM_INFO, MSG_INFO = 14, 12
OPEN_FILES = 4096
"""A process may have so many: each holds memory of the kernel that no sample sees."""
INOTIFY_INSTANCES = 32
"""The kernel charges them also to the user who made the sandbox, who may have 128."""
IN_MEMORY = ("/memfd:", "/dev/shm/", "/dev/zero", "/SYSV")
"""Files that are no files of a disk, as /proc shows them."""
FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
HOST_FOLDERS = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32")
HOST_ETC = (
    "alternatives", "ca-certificates", "debian_version", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "mime.types",
    "os-release", "perl", "pki", "protocols", "python3", "python3.11", "python3.12", "python3.13", "services", "ssl",
)  # fmt: skip
OWN_ETC = {
    "passwd": f"agent:x:{INNER_ID}:{INNER_ID}::/tmp:/bin/sh\nnobody:x:65534:65534::/:/usr/sbin/nologin\n",
    "group": f"agent:x:{INNER_ID}:\nnogroup:x:65534:\n",
    "hostname": "sandbox\n",
    "hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n",
    "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}
DEVICES = ("null", "zero", "full", "random", "urandom")

libc = ctypes.CDLL(None, use_errno=True)


class Failed(Exception):
    """The command could not be started as asked; the text goes to the manager."""


def call(what, result):
    """Check the result of a libc call: -1 becomes `Failed` with its reason."""
    if result == -1:
        raise Failed(f"{what}: {os.strerror(ctypes.get_errno())}")
    return result


# The cage -------------------------------------------------------------------------------------------------------------


def mount(source, target, kind=None, flags=0, data=None):
    encoded = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    call(f"mount {source} on {target}", libc.mount(*encoded[:3], ctypes.c_ulong(flags), encoded[3]))


def bind(source, target, attributes):
    """Show `source` (with what is mounted below it) at `target`, and give every mount of it these attributes."""
    mount(source, target, None, MS_BIND | MS_REC)
    if attributes:
        set_attributes(target, attributes, AT_RECURSIVE)


def set_attributes(target, attributes, flags):
    wanted = (ctypes.c_uint64 * 4)(attributes, 0, 0, 0)
    result = libc.syscall(SYS_MOUNT_SETATTR, -100, target.encode(), flags, ctypes.byref(wanted), ctypes.sizeof(wanted))
    call(f"mount_setattr {target}", result)


def unshare(what, flags):
    call(f"unshare {what}", libc.unshare(flags))


def write_text(path, text):
    with open(path, "w") as file:
        file.write(text)


def map_own_user():
    """As an ordinary user: become root of a user namespace, which is what allows every other namespace."""
    uid, gid = os.geteuid(), os.getegid()
    unshare("user namespace", NEWUSER)
    write_text("/proc/self/setgroups", "deny")
    write_text("/proc/self/uid_map", f"0 {uid} 1")
    write_text("/proc/self/gid_map", f"0 {gid} 1")


def enter(request):
    """In process 1 of the pid namespace: the other namespaces, a root that holds only what the spec names, and lo up."""
    kinds = NEWNS | NEWIPC | NEWUTS | NEWCGROUP | (0 if request["network"] else NEWNET)
    unshare("mount, ipc, uts, cgroup, net namespaces", kinds)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    top = request["mountpoint"]
    mount("tmpfs", top, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=16m")
    show_host(top, request["network"])
    make_devices(top)
    for path in request["folders"]:
        os.makedirs(top + path, exist_ok=True)
        show_folder(request, path, top + path)
    for source, path in request["mounts"]:
        os.makedirs(top + path, exist_ok=True)
        bind(source, top + path, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV)
    os.makedirs(top + "/proc", exist_ok=True)
    mount("proc", top + "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    os.chdir(top)
    machine = os.uname().machine
    if machine not in SYS_PIVOT_ROOT:
        raise Failed(f"pivot_root: no system call number known for {machine}")
    call("pivot_root", libc.syscall(SYS_PIVOT_ROOT[machine], b".", b"."))
    call("umount of the host", libc.umount2(b".", MNT_DETACH))
    os.chdir("/")
    set_attributes("/", ATTR_RDONLY, 0)
    call("sethostname", libc.sethostname(b"sandbox", 7))
    if not request["network"]:
        raise_loopback()


def show_folder(request, path, target):
    """A folder that may be written: as it is, or as the upper layer of a stack."""
    upper = request["root"] + path
    if not request["lowers"]:
        bind(upper, target, ATTR_NOSUID | ATTR_NODEV)
        return
    work = request["overlay_work"] + path
    os.makedirs(work, exist_ok=True)
    # Below one folder and relative to it: a page has room for few whole paths.
    os.chdir(request["layers"])
    lowers = ":".join(escape(name + path) for name in request["lowers"])
    # Without redirects a folder of a lower layer cannot be renamed in place (EXDEV, mv copies); with them outsiders
    # could not find a name through the layers.
    kind = "userxattr" if os.getuid() or request["own_namespace"] else "redirect_dir=off,metacopy=off,index=off"
    data = f"lowerdir={lowers},upperdir={escape(upper)},workdir={escape(work)},xino=off,{kind}"
    mount("overlay", target, "overlay", MS_NOSUID | MS_NODEV, data)


def escape(path):
    return "".join("\\" + letter if letter in ":,\\" else letter for letter in path)


def enter_guest():
    """In gVisor the whole kernel is the sandbox's own: only the processes of this command need to be told apart."""
    unshare("mount, ipc namespaces", NEWNS | NEWIPC)
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)


def show_host(top, network):
    """The host's programs and the least of /etc that they need, read-only."""
    hidden = ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV
    for name in HOST_FOLDERS:
        if os.path.islink("/" + name):
            os.symlink(os.readlink("/" + name), f"{top}/{name}")
        elif os.path.isdir("/" + name):
            os.mkdir(f"{top}/{name}")
            bind("/" + name, f"{top}/{name}", hidden)
    for name in ("etc", "tmp", "run", "var"):
        os.mkdir(f"{top}/{name}")
    os.symlink("/tmp", f"{top}/var/tmp")
    for name, text in OWN_ETC.items():
        write_text(f"{top}/etc/{name}", text)
    for name in HOST_ETC + (("resolv.conf",) if network else ()):
        if os.path.isdir("/etc/" + name):
            os.mkdir(f"{top}/etc/{name}")
        elif os.path.isfile("/etc/" + name):
            write_text(f"{top}/etc/{name}", "")
        else:
            continue
        bind("/etc/" + name, f"{top}/etc/{name}", hidden)


def make_devices(top):
    os.makedirs(f"{top}/dev/shm")
    for name in DEVICES:
        write_text(f"{top}/dev/{name}", "")
        bind(f"/dev/{name}", f"{top}/dev/{name}", 0)
    os.symlink("/proc/self/fd", f"{top}/dev/fd")
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        os.symlink(f"/proc/self/fd/{number}", f"{top}/dev/{name}")
    mount("tmpfs", f"{top}/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=1777,size={SHM_BYTES}")


def raise_loopback():
    """SIOCSIFFLAGS on lo: a struct ifreq is 16 bytes of name, then the flags (UP and RUNNING)."""
    sock = call("socket", libc.socket(2, 2, 0))
    request = b"lo".ljust(16, b"\0") + (0x41).to_bytes(2, sys.byteorder) + bytes(22)
    call("raise lo", libc.ioctl(sock, ctypes.c_ulong(0x8914), request))
    os.close(sock)


# The command ----------------------------------------------------------------------------------------------------------


def start(request, caged):
    """Fork the command; gives its process id and the reading end of its output."""
    output, output_in = os.pipe()
    trouble, trouble_in = os.pipe()
    ready, ready_in = os.pipe()
    mapped, mapped_in = os.pipe()
    child = os.fork()
    if child == 0:
        become(request, caged, output_in, trouble_in, ready_in, mapped)
    for fd in (output_in, trouble_in, ready_in, mapped):
        os.close(fd)
    if caged and not request["guest"] and os.read(ready, 1):
        # Written from outside: a namespace may map only its own creator itself, and on some hosts not even that.
        outer = request["outer_id"]
        write_text(f"/proc/{child}/uid_map", f"{INNER_ID} {outer} 1")
        write_text(f"/proc/{child}/gid_map", f"{INNER_ID} {outer} 1")
        os.write(mapped_in, b"m")
    os.close(mapped_in)
    os.close(ready)
    text = os.read(trouble, 4096)
    os.close(trouble)
    if text:
        raise Failed(text.decode())
    return child, output


def become(request, caged, output, trouble, ready, mapped):
    """In the forked child: give up everything, then turn into the command. Never returns."""
    try:
        os.setsid()
        if request["memory_group"] >= 0:
            os.write(request["memory_group"], b"0")
        write_text("/proc/self/oom_score_adj", "1000")
        if request["guest"]:
            drop_root()
        elif caged:
            drop_privileges(request["outer_id"], ready, mapped)
        call("no_new_privs", libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        # 1 and not 0: that is what keeps the kernel from starting the host's own collector of core dumps (core(5)).
        limit(RLIMIT_CORE, 1)
        limit(RLIMIT_FSIZE, request["disk_bytes"])
        lower(RLIMIT_NOFILE, OPEN_FILES)
        if caged:
            limit(RLIMIT_NPROC, request["processes"])
        for ignored_by_python in (SIGPIPE, SIGXFSZ):
            libc.signal(ignored_by_python, None)
        libc.sigprocmask(SIG_SETMASK, bytes(128), None)
        os.umask(0o022)
        if not request["guest"]:
            # The session's keys of whoever started us would be the command's. Without a keyring of its own the filter holds.
            libc.syscall(SYS_KEYCTL.get(os.uname().machine, -1), JOIN_SESSION_KEYRING, None)
        if caged and not request["guest"]:
            restrict_writes(request["folders"])
        null = os.open("/dev/null", os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        if request["filter"]:
            refuse_calls(request["filter"])
    except BaseException as error:
        os.write(trouble, f"start of the command: {error or type(error).__name__}".encode()[:4096])
        os._exit(1)
    os.close(trouble)
    execute(request)


def execute(request):
    """As a shell would: 127 for a program that is not there, 126 for one that cannot run."""
    program = request["argv"][0]
    try:
        os.chdir(request["cwd"])
    except OSError as error:
        os.write(2, f"cd: {request['shown_cwd']}: {error.strerror}\n".encode("utf-8", "replace"))
        os._exit(1)
    try:
        os.execvpe(program, request["argv"], request["env"])
    except FileNotFoundError:
        os.write(2, f"{program}: not found\n".encode("utf-8", "replace"))
        os._exit(127)
    except OSError as error:
        os.write(2, f"{program}: {error.strerror}\n".encode("utf-8", "replace"))
        os._exit(126)
    except ValueError as error:
        # A zero byte or half a surrogate pair: a model wrote it, so it is the command's failure and not ours.
        os.write(2, f"sandbox: {error}\n".encode("utf-8", "replace"))
        os._exit(126)


def drop_privileges(outer_id, ready, mapped):
    """Into a user namespace of its own (RLIMIT_NPROC counts per namespace, Linux >= 5.14), as a user without capabilities."""
    unshare("inner user namespace", NEWUSER)
    os.write(ready, b"r")
    if not os.read(mapped, 1):
        raise Failed("no user was mapped")
    write_text("/proc/sys/user/max_user_namespaces", "0")
    write_text("/proc/sys/user/max_inotify_instances", str(INOTIFY_INSTANCES))
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    if outer_id:
        os.setgroups([])
    os.setresgid(INNER_ID, INNER_ID, INNER_ID)
    os.setresuid(INNER_ID, INNER_ID, INNER_ID)


def drop_root():
    """As a user without capabilities, where no user namespace is needed."""
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    os.setgroups([])
    os.setresgid(INNER_ID, INNER_ID, INNER_ID)
    os.setresuid(INNER_ID, INNER_ID, INNER_ID)


def limit(which, value):
    """Set a limit; where the host's is lower already, that one stays."""
    pair = read_limit(which)
    pair[0] = pair[1] = min(value, pair[1])
    call(f"setrlimit {which}", libc.setrlimit(which, ctypes.byref(pair)))


def lower(which, value):
    """Lower what a program may raise its limit to, and the limit only where it is beyond that."""
    pair = read_limit(which)
    pair[0], pair[1] = min(value, pair[0]), min(value, pair[1])
    call(f"setrlimit {which}", libc.setrlimit(which, ctypes.byref(pair)))


def read_limit(which):
    pair = (ctypes.c_ulong * 2)()
    call(f"getrlimit {which}", libc.getrlimit(which, ctypes.byref(pair)))
    return pair


def restrict_writes(folders):
    """Landlock, where the kernel has it with scopes: nothing is written but in the sandbox's own folders, no device made, and
    neither a signal nor a connection to an abstract socket reaches a process outside."""
    if libc.syscall(SYS_LANDLOCK_CREATE, None, 0, 1) < LANDLOCK_SCOPES_SINCE:
        return
    ruled = (ctypes.c_uint64 * 3)(LANDLOCK_WRITES, 0, LANDLOCK_SCOPES)
    rules = call("landlock", libc.syscall(SYS_LANDLOCK_CREATE, ctypes.byref(ruled), ctypes.sizeof(ruled), 0))
    inside = LANDLOCK_WRITES & ~LANDLOCK_MAKES_DEVICE
    allowed = [(path, inside) for path in (*folders, "/dev/shm")] + [
        (path, LANDLOCK_FILE_WRITES) for path in ("/dev", "/proc")
    ]
    for path, writes in allowed:
        folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
        # struct landlock_path_beneath_attr is packed: 8 bytes of rights, 4 of a descriptor.
        rule = writes.to_bytes(8, sys.byteorder) + folder.to_bytes(4, sys.byteorder)
        call(f"landlock {path}", libc.syscall(SYS_LANDLOCK_ADD, rules, 1, rule, 0))
        os.close(folder)
    call("landlock", libc.syscall(SYS_LANDLOCK_RESTRICT, rules, 0))
    os.close(rules)


def refuse_calls(program):
    """Seccomp: the filter counts from here on, for everything that the command starts."""
    code = ctypes.create_string_buffer(program, len(program))
    given = (ctypes.c_uint64 * 2)(len(program) // 8, ctypes.addressof(code))
    call("seccomp", libc.prctl(PR_SET_SECCOMP, SECCOMP_FILTER, ctypes.byref(given), 0, 0))


# Supervision ----------------------------------------------------------------------------------------------------------


class Namespace:
    """Every process of the pid namespace except this one, which is its first."""

    def pids(self):
        return [name for name in os.listdir("/proc") if name.isdigit() and name != "1"]

    def signal(self, number):
        try:  # noqa: SIM105  (contextlib would cost start-up time)
            os.kill(-1, number)
        except ProcessLookupError:
            pass


class Descendants:
    """Everything below this process, which adopts the orphans among them."""

    def pids(self):
        found, stack = [], [str(os.getpid())]
        while stack:
            try:
                pid = stack.pop()
                for thread in os.listdir(f"/proc/{pid}/task"):
                    with open(f"/proc/{pid}/task/{thread}/children") as file:
                        children = file.read().split()
                    found += children
                    stack += children
            except OSError:
                continue
        return found

    def signal(self, number):
        for pid in self.pids():
            try:  # noqa: SIM105  (contextlib would cost start-up time)
                os.kill(int(pid), number)
            except OSError:
                pass


def kill_family(family):
    """Until none is left. Again and again: gVisor may miss one that is just being forked, and waiting for it would never end."""
    wait_s = 0.0005
    while True:
        family.signal(SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(wait_s)
        wait_s = min(2 * wait_s, SAMPLE_S)


class Stopped(Exception):
    """The manager closed the sandbox or is gone."""


class Supervisor:
    """Watches one command until it ends, then kills what it left and says how it ended."""

    def __init__(self, request, family, signals, oom_control):
        self.request, self.family, self.signals, self.oom_control = request, family, signals, oom_control
        self.output = bytearray()
        self.truncated = self.timed_out = self.memory_exceeded = False
        self.note = b""
        self.killed = False

    def run(self, child, output):
        self.child, self.status = child, None
        self.begin = time.monotonic()
        self.oom_kills = self.count_oom_kills()
        self.disk_at_start, self.names_at_start = self.own_files()
        try:
            self.watch(output)
        finally:
            if self.status is None or not self.request["keep_processes"]:
                kill_family(self.family)
        elapsed = time.monotonic() - self.begin
        self.drain(output)
        self.check_group()
        self.check_disk([])
        if self.note:
            self.output += self.note
        numbers = (self.exit_code(), self.timed_out, self.truncated, self.memory_exceeded, int(elapsed * 1e6))
        return "done " + " ".join(str(int(number)) for number in numbers) + "\n", bytes(self.output)

    def watch(self, output):
        deadline = self.begin + self.request["timeout_s"]
        self.next_sample, self.next_disk = self.begin + SAMPLE_S, self.begin + DISK_SAMPLE_S
        poller = select.poll()
        for fd in (0, output, self.signals):
            poller.register(fd, select.POLLIN)
        os.set_blocking(output, False)
        while self.status is None and not self.killed:
            now = time.monotonic()
            if now >= deadline:
                self.timed_out = True
                return
            if now >= self.next_sample:
                self.sample()
            wait_s = max(0.0, min(deadline, self.next_sample) - time.monotonic())
            for fd, _ in poller.poll(wait_s * 1000 + 1):
                if fd == 0:
                    deadline += self.listen()
                if fd == output:
                    if not self.collect(output):
                        poller.unregister(output)
                elif os.read(self.signals, 128)[0] == SIGTERM:
                    raise Stopped
            self.reap()

    def listen(self):
        """What the manager says: `p` to stand still until a `c`, the end of the stream to stop. Gives the seconds stood still."""
        begin, paused = time.monotonic(), False
        while True:
            if paused:
                # Again and again: one that was just being forked is met the next time.
                self.family.signal(SIGSTOP)
                if not select.select([0], [], [], SAMPLE_S)[0]:
                    continue
            word = os.read(0, 1)
            if not word:
                raise Stopped
            paused = word == b"p"
            if not paused:
                self.family.signal(SIGCONT)
                paused_s = time.monotonic() - begin
                self.begin += paused_s
                return paused_s

    def collect(self, output):
        """Take what is there, keep what fits; false at the end of the stream."""
        try:
            data = os.read(output, 1 << 16)
        except BlockingIOError:
            return True
        room = self.request["output_bytes"] - len(self.output)
        self.output += data[:room]
        self.truncated |= len(data) > room
        return bool(data)

    def drain(self, output):
        """After the end: everybody who could write is dead, so the pipe holds all that is left."""
        try:
            while data := os.read(output, 1 << 16):
                room = self.request["output_bytes"] - len(self.output)
                self.output += data[:room]
                self.truncated |= len(data) > room
        except BlockingIOError:
            pass

    def reap(self):
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.status = status

    def sample(self):
        pids = self.family.pids()
        self.check_group()
        kept = self.kept_bytes()
        if sum(resident_bytes(pid) for pid in pids) + kept > self.request["memory_bytes"]:
            # Resident pages count once per process that maps them; this finer sum costs more, so it comes second.
            sizes = [own_bytes(pid) for pid in pids]
            anonymous, shared = sum(size[0] for size in sizes), sum(size[1] for size in sizes)
            self.memory_exceeded |= anonymous + max(shared, kept) > self.request["memory_bytes"]
        # Namespaces have the kernel's own limit; without them this is the only one.
        too_many = len(pids) > self.request["processes"]
        if too_many:
            self.note = b"[sandbox] process limit of %d exceeded\n" % self.request["processes"]
        now = time.monotonic()
        if now >= self.next_disk:
            self.check_disk(pids)
            self.next_disk = now + max(DISK_SAMPLE_S, 20 * (time.monotonic() - now))
        self.killed |= self.memory_exceeded or too_many
        self.next_sample = now + SAMPLE_S

    def check_group(self):
        self.memory_exceeded |= self.count_oom_kills() > self.oom_kills

    def count_oom_kills(self):
        if self.oom_control < 0:
            return 0
        words = os.pread(self.oom_control, 4096, 0).split()
        return int(words[words.index(b"oom_kill") + 1])

    def kept_bytes(self):
        """Memory that lies in files and segments of the sandbox's own, whether a process maps it or not."""
        if self.request["memory_group"] >= 0 or self.request["seen_root"]:
            return 0  # a control group counts it; without namespaces it is the host's
        if self.request["guest"]:
            return tree_size("/dev/shm")[0] + segment_bytes()
        memory = os.statvfs("/dev/shm")
        return (memory.f_blocks - memory.f_bfree) * memory.f_frsize + segment_bytes()

    def check_disk(self, pids):
        used, names = self.own_files()
        used += nameless_bytes(pids)
        allowed, allowed_names = self.request["disk_bytes"], self.request["names"]
        # A command that only frees space may run although the sandbox is over its limit.
        if used > allowed and used > self.disk_at_start:
            self.killed = True
            self.note = b"[sandbox] disk limit of %d MB exceeded\n" % (allowed >> 20)
        elif names > allowed_names and names > self.names_at_start:
            self.killed = True
            self.note = b"[sandbox] limit of %d names of files exceeded\n" % allowed_names

    def own_files(self):
        """Bytes and names in the folders that may be written."""
        sizes = [tree_size(self.request["seen_root"] + path) for path in self.request["folders"]]
        return sum(size[0] for size in sizes), sum(size[1] for size in sizes)

    def exit_code(self):
        if self.timed_out:
            return 124
        if self.killed or self.status is None:
            return 128 + SIGKILL
        code = os.waitstatus_to_exitcode(self.status)
        return code if code >= 0 else 128 - code


def tree_size(top):
    """Blocks in bytes of all that lies below a folder, how many names it has, and the bytes of its longest path.

    Walked with one folder open at a time: a whole path ends at 4096 bytes, and what lies deeper would not count. A folder that is
    moved meanwhile ends the walk early; after the command none is.
    """
    try:
        here = os.open(top, FOLDER)
    except OSError:
        return 0, 0, 0
    total, names, folders = list_folder(here)
    longest = length = 0
    way = [(os.fstat(here), folders, 0)]
    try:
        while way:
            status, folders, size = way[-1]
            if not os.path.samestat(os.fstat(here), status):
                break
            if folders:
                name = folders.pop()
                try:
                    inner = os.open(name, FOLDER, dir_fd=here)
                except OSError:
                    continue
                here = replace_fd(here, inner)
                used, more, below = list_folder(here)
                total, names = total + used, names + more
                way.append((os.fstat(here), below, len(os.fsencode(name)) + 1))
                length += way[-1][2]
                longest = max(longest, length)
            else:
                way.pop()
                length -= size
                here = replace_fd(here, os.open("..", FOLDER, dir_fd=here))
    except OSError:
        pass
    finally:
        os.close(here)
    return total, names, longest


def replace_fd(old, new):
    os.close(old)
    return new


def list_folder(fd):
    """Blocks in bytes of what is in a folder itself, how many names that is, and the names of the folders in it."""
    total, names, folders = 0, 0, []
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                total += entry.stat(follow_symlinks=False).st_blocks * 512
                names += 1
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
    except OSError:
        pass
    return total, names, folders


def nameless_bytes(pids):
    """Files that were removed while one of these processes has them open: no walk of folders finds them."""
    found = {}
    for pid in pids:
        try:
            with os.scandir(f"/proc/{pid}/fd") as entries:
                for entry in entries:
                    try:
                        status = entry.stat()
                        if status.st_nlink or status.st_mode & 0o170000 != 0o100000:
                            continue
                        if not os.readlink(entry.path).startswith(IN_MEMORY):
                            found[status.st_dev, status.st_ino] = status.st_blocks * 512
                    except OSError:
                        continue
        except OSError:
            continue
    return sum(found.values())


def segment_bytes():
    """Memory of System V segments and messages in this namespace, attached or not."""
    segments, messages = (ctypes.c_ulong * 8)(), (ctypes.c_int * 16)()
    libc.shmctl(0, SHM_INFO, ctypes.byref(segments))  # how many, pages, resident pages, ...
    libc.msgctl(0, MSG_INFO, ctypes.byref(messages))  # ..., the seventh is the bytes of all messages
    return segments[2] * os.sysconf("SC_PAGESIZE") + messages[6]


def resident_bytes(pid):
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")
    except (OSError, IndexError):
        return 0


def own_bytes(pid):
    """Anonymous and shared memory, each page divided among those who map it."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            sizes = {words[0]: int(words[1]) << 10 for words in map(str.split, file) if words[0].startswith("Pss_")}
    except OSError:
        return resident_bytes(pid), 0  # gVisor has no such file
    return sizes.get("Pss_Anon:", 0), sizes.get("Pss_Shmem:", 0)


# The program ----------------------------------------------------------------------------------------------------------


def read_exactly(size):
    data = b""
    while len(data) < size:
        part = os.read(0, size - len(data))
        if not part:
            sys.exit(0)
        data += part
    return data


def block_signals(*numbers):
    """They arrive in a file descriptor, where a poll sees them and no handler races."""
    mask = ctypes.create_string_buffer(128)
    for number in numbers:
        libc.sigaddset(mask, number)
    libc.sigprocmask(SIG_BLOCK, mask, None)
    return call("signalfd", libc.signalfd(-1, mask, 0o2000000))


def die_with(parent, signal):
    """Ask for `signal` when the parent ends; it may have ended before we asked."""
    call("pdeathsig", libc.prctl(PR_SET_PDEATHSIG, signal, 0, 0, 0))
    if parent is not None and os.getppid() != parent:
        sys.exit(0)


def open_group(request):
    """The memory control group, opened while the host's files are still in sight."""
    path = request["memory_group"]
    if not path:
        request["memory_group"] = -1
        return -1
    request["memory_group"] = os.open(path + "/cgroup.procs", os.O_WRONLY)
    return os.open(path + "/memory.oom_control", os.O_RDONLY)


def send(header, output=b""):
    data = memoryview(header.encode() + output)
    try:
        while data:
            data = data[os.write(1, data) :]
    except BrokenPipeError:
        pass  # the manager is dead


def supervise(request, caged, signals):
    try:
        oom_control = open_group(request)
        if caged and request["guest"]:
            enter_guest()
        elif caged:
            enter(request)
        child, output = start(request, caged)
        family = Namespace() if caged else Descendants()
        send(*Supervisor(request, family, signals, oom_control).run(child, output))
    except Stopped:
        pass
    except Exception as error:
        send(f"failed {error or type(error).__name__}\n")


def main():
    if len(sys.argv) > 1:
        print(*tree_size(sys.argv[1]))
        return
    request = marshal.loads(read_exactly(int.from_bytes(read_exactly(4), "little")))
    request["own_namespace"] = False
    request["guest"] = request["isolation"] == "guest"
    if request["isolation"] == "none" or request["keep_processes"]:
        die_with(None if request["guest"] else request["parent"], SIGTERM)
        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        supervise(request, False, block_signals(SIGTERM, SIGCHLD))
        return
    die_with(None if request["guest"] else request["parent"], SIGKILL)
    try:
        if os.geteuid() != 0:
            map_own_user()
            request["own_namespace"] = True
        unshare("pid namespace", NEWPID)
        init = os.fork()
    except (Failed, OSError) as error:
        send(f"failed {error}\n")
        return
    if init == 0:
        die_with(None, SIGKILL)
        # Python handles this one, and a blocked one is kept: the first process gets both, and the command may have its user.
        libc.signal(SIGINT, None)
        supervise(request, True, block_signals(SIGCHLD))
        os._exit(0)
    os.waitpid(init, 0)


if __name__ == "__main__":
    main()
