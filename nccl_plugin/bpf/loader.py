"""Loads the counter program into the kernel and pins its socket map, for as long as a ``CounterProgram`` is open."""

import errno
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cffi import FFI

from checkmate.config import CheckmateError
from checkmate.native import library

MAP_NAME = "counter_map"
_PROGRAM = "counter"

_LIBBPF = """
struct bpf_object; struct bpf_program; struct bpf_map; struct bpf_link;
struct bpf_object *bpf_object__open_file(const char *path, const void *opts);
int bpf_object__load(struct bpf_object *obj);
void bpf_object__close(struct bpf_object *obj);
struct bpf_program *bpf_object__find_program_by_name(const struct bpf_object *obj, const char *name);
struct bpf_map *bpf_object__find_map_by_name(const struct bpf_object *obj, const char *name);
int bpf_map__pin(struct bpf_map *map, const char *path);
struct bpf_link *bpf_program__attach_cgroup(const struct bpf_program *prog, int cgroup_fd);
int bpf_link__destroy(struct bpf_link *link);
"""

_ffi: Any = FFI()
_ffi.cdef(_LIBBPF)


class CounterProgram:
    """The program, attached to a cgroup, and its map, pinned at ``map_path``; a context manager.

    The kernel detaches the program when this process ends, however it ends. A pin that is left then does no harm: the
    plugin sees that no program arms its sockets, and the next ``load`` replaces the pin.
    """

    def __init__(self, map_path: Path, lib: Any, obj: Any, link: Any) -> None:
        self.map_path = map_path
        self._lib, self._object, self._link = lib, obj, link

    @classmethod
    def load(cls, pin_dir: Path, cgroup: Path | None = None) -> Self:
        """Load, attach to ``cgroup`` (None: the root of cgroup v2, so that every process is in it) and pin.

        ``pin_dir``: directory on a BPF file system. Raises CheckmateError when something is missing.
        """
        if _filesystem_type(pin_dir) != "bpf":
            raise CheckmateError(
                f"{pin_dir} is not on a BPF file system, so that the counter map cannot be pinned there; "
                "choose a directory that is (a machine has /sys/fs/bpf, after `mount -t bpf bpf /sys/fs/bpf`)"
            )
        cgroup = cgroup or _cgroup2_root()
        map_path = pin_dir / MAP_NAME
        lib = _libbpf()
        obj = _open(lib, library("counter.bpf.o"))
        try:
            map_path.unlink(missing_ok=True)
            _pin(lib, obj, map_path)
            try:
                link = _attach(lib, obj, cgroup)
            except BaseException:
                map_path.unlink()
                raise
        except BaseException:
            lib.bpf_object__close(obj)
            raise
        return cls(map_path, lib, obj, link)

    def close(self) -> None:
        """Detach and unpin. Connections that exist keep their option until they are closed."""
        if self._object is None:
            return
        self._lib.bpf_link__destroy(self._link)
        self._lib.bpf_object__close(self._object)
        self._object = None
        with suppress(OSError):
            self.map_path.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


def _libbpf() -> Any:
    try:
        return _ffi.dlopen("libbpf.so.1")
    except OSError:
        raise CheckmateError("libbpf.so.1 is not installed; run `apt-get install libbpf1`") from None


def _mounts() -> list[tuple[str, str, Path, str]]:
    """Device numbers, root, mount point and type of each mount of this process."""
    mounts = []
    for line in Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines():
        fields, _, rest = line.partition(" - ")
        _, _, device, root, point, *_ = fields.split()
        mounts.append((device, root, Path(point), rest.split()[0]))
    return mounts


def _filesystem_type(directory: Path) -> str:
    if not directory.is_dir():
        raise CheckmateError(
            f"{directory}, where the counter map is to be pinned, is not a directory; choose one on a BPF file system, "
            "for example /sys/fs/bpf"
        )
    number = directory.stat().st_dev
    device = f"{os.major(number)}:{os.minor(number)}"
    return next((kind for dev, _, _, kind in _mounts() if dev == device), "unknown")


def _cgroup2_root() -> Path:
    for _, root, point, kind in _mounts():
        if kind == "cgroup2" and root == "/":
            return point
    raise CheckmateError(
        "the root of cgroup v2 is not mounted; run `mount -t cgroup2 none DIRECTORY`. `ip netns exec` hides it: "
        "use `nsenter --net=/run/netns/NAME` instead"
    )


def _open(lib: Any, path: Path) -> Any:
    obj = lib.bpf_object__open_file(os.fsencode(path), _ffi.NULL)
    if obj == _ffi.NULL:
        raise CheckmateError(f"cannot read BPF object {path}: {os.strerror(_ffi.errno)}")
    result = lib.bpf_object__load(obj)
    if result < 0:
        lib.bpf_object__close(obj)
        raise CheckmateError(f"the kernel refuses the counter program ({os.strerror(-result)}): {_advice(-result)}")
    return obj


def _pin(lib: Any, obj: Any, path: Path) -> None:
    result = lib.bpf_map__pin(lib.bpf_object__find_map_by_name(obj, MAP_NAME.encode()), os.fsencode(path))
    if result < 0:
        raise CheckmateError(f"cannot pin the counter map at {path}: {os.strerror(-result)}")


def _attach(lib: Any, obj: Any, cgroup: Path) -> Any:
    try:
        descriptor = os.open(cgroup, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise CheckmateError(f"cannot open cgroup {cgroup}: {error.strerror}") from None
    try:
        program = lib.bpf_object__find_program_by_name(obj, _PROGRAM.encode())
        link = lib.bpf_program__attach_cgroup(program, descriptor)
    finally:
        os.close(descriptor)
    if link == _ffi.NULL:
        raise CheckmateError(
            f"cannot attach the counter program to cgroup {cgroup} ({os.strerror(_ffi.errno)}): {_advice(_ffi.errno)}"
        )
    return link


def _advice(error: int) -> str:
    if error in (errno.EPERM, errno.EACCES):
        return "it needs CAP_BPF and CAP_NET_ADMIN; run as root"
    if error in (errno.ENOSYS, errno.EOPNOTSUPP):
        return "the kernel needs CONFIG_BPF_SYSCALL=y and CONFIG_CGROUP_BPF=y"
    return "the verifier's report is on standard error; Linux 5.15 or later is needed"
