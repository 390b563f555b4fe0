"""The part of libbpf that the switch uses, through cffi in ABI mode: objects, maps and tc hooks."""

import errno
import os
import re
from importlib import resources
from pathlib import Path
from typing import Any

from cffi import FFI

from checkmate.config import CheckmateError

INGRESS = 1
EGRESS = 2
_REPLACE = 1  # BPF_TC_F_REPLACE
_ANY = 0  # BPF_ANY

_LIBBPF = """
struct bpf_object; struct bpf_program; struct bpf_map;
struct bpf_object *bpf_object__open_file(const char *path, const void *opts);
int bpf_object__load(struct bpf_object *obj);
void bpf_object__close(struct bpf_object *obj);
struct bpf_program *bpf_object__find_program_by_name(const struct bpf_object *obj, const char *name);
int bpf_program__fd(const struct bpf_program *prog);
struct bpf_map *bpf_object__find_map_by_name(const struct bpf_object *obj, const char *name);
int bpf_map__fd(const struct bpf_map *map);
uint32_t bpf_map__key_size(const struct bpf_map *map);
uint32_t bpf_map__value_size(const struct bpf_map *map);
uint32_t bpf_map__max_entries(const struct bpf_map *map);
int bpf_map_update_elem(int fd, const void *key, const void *value, uint64_t flags);
int bpf_map_lookup_elem(int fd, const void *key, void *value);
int bpf_map_delete_elem(int fd, const void *key);
int bpf_map_get_next_key(int fd, const void *key, void *next_key);
int bpf_map_lookup_batch(int fd, void *in_batch, void *out_batch, void *keys, void *values, uint32_t *count,
                         const void *opts);
int libbpf_num_possible_cpus(void);
void *libbpf_set_print(void *fn);

struct bpf_tc_hook { size_t sz; int ifindex; int attach_point; uint32_t parent; };
struct bpf_tc_opts { size_t sz; int prog_fd; uint32_t flags; uint32_t prog_id; uint32_t handle; uint32_t priority; };
int bpf_tc_hook_create(struct bpf_tc_hook *hook);
int bpf_tc_hook_destroy(struct bpf_tc_hook *hook);
int bpf_tc_attach(const struct bpf_tc_hook *hook, struct bpf_tc_opts *opts);
int bpf_tc_detach(const struct bpf_tc_hook *hook, const struct bpf_tc_opts *opts);
int bpf_tc_query(const struct bpf_tc_hook *hook, struct bpf_tc_opts *opts);
"""


def _declarations() -> str:
    """What maps.h declares, without the lines that only a C preprocessor understands."""
    text = resources.files(__package__).joinpath("maps.h").read_text()
    return re.sub(r"(?m)^#\s*(include|ifndef|endif).*$|^#define CHECKMATE_\w+_H$", "", text)


ffi: Any = FFI()
ffi.cdef(_LIBBPF)
ffi.cdef(_declarations())
constants: Any = ffi.dlopen(None)
"""Constants and enumerators of maps.h."""

try:
    _lib: Any = ffi.dlopen("libbpf.so.1")
except OSError:
    _lib = None


def _library() -> Any:
    if _lib is None:
        raise CheckmateError("libbpf.so.1 is not installed; run `apt-get install libbpf1`")
    return _lib


def _check(result: int, what: str) -> None:
    """libbpf 1.x returns a negative errno."""
    if result < 0:
        raise OSError(-result, f"{what}: {os.strerror(-result)}")


class Map:
    """A map; keys and values are the C types of maps.h, a per-CPU map's value is one per CPU."""

    def __init__(self, fd: int, entries: int, key: str, value: str, cpus: int = 1) -> None:
        self._fd = fd
        self.entries = entries
        self._key = ffi.typeof(f"{key}[1]")
        self._value = ffi.typeof(f"{value}[{cpus}]")
        self._cpus = cpus

    def _new_key(self, key: Any) -> Any:
        return ffi.new(self._key, [key])

    def set(self, key: Any, value: Any) -> None:
        """Write one entry; a per-CPU map holds the value on the first CPU and zeros on the others.

        Raises OSError: E2BIG or ENOMEM when the map is full.
        """
        _check(
            _library().bpf_map_update_elem(self._fd, self._new_key(key), ffi.new(self._value, [value]), _ANY),
            "map update",
        )

    def get(self, key: Any) -> Any:
        """The entry's values, one for each CPU of a per-CPU map; KeyError when there is none."""
        value = ffi.new(self._value)
        if _library().bpf_map_lookup_elem(self._fd, self._new_key(key), value) < 0:
            raise KeyError(key)
        return value

    def delete(self, key: Any) -> None:
        """Remove an entry; one that is not there is left so."""
        result = _library().bpf_map_delete_elem(self._fd, self._new_key(key))
        if result != -errno.ENOENT:
            _check(result, "map delete")

    def clear(self) -> None:
        """Remove all entries of a hash map."""
        key = ffi.new(self._key)
        while _library().bpf_map_get_next_key(self._fd, ffi.NULL, key) == 0:
            self.delete(key[0])

    def read(self, start: int, count: int) -> list[Any]:
        """Values [start, start + count) of an array map in one call; per-CPU values as ``get`` gives them."""
        values = ffi.new(f"{self._value.item.cname}[{count}][{self._cpus}]")
        keys, batch = ffi.new("uint32_t[]", count), ffi.new("uint32_t[1]")
        before = ffi.new("uint32_t[1]", [start - 1]) if start else ffi.NULL
        done = ffi.new("uint32_t *", count)
        result = _library().bpf_map_lookup_batch(self._fd, before, batch, keys, values, done, ffi.NULL)
        if result != -errno.ENOENT:  # the end of the map
            _check(result, "map read")
        return list(values)


class Object:
    """A loaded BPF object file. Raises CheckmateError when the kernel does not take it."""

    def __init__(self, path: Path) -> None:
        self._lib = _library()
        self._object = self._lib.bpf_object__open_file(os.fsencode(path), ffi.NULL)
        if self._object == ffi.NULL:
            raise CheckmateError(f"cannot read BPF object {path}: {os.strerror(ffi.errno)}")
        result = self._lib.bpf_object__load(self._object)
        if result < 0:
            self.close()
            raise CheckmateError(f"the kernel refuses {path.name} ({os.strerror(-result)}): {_advice(-result)}")

    def program(self, name: str) -> int:
        """File descriptor of a program."""
        return int(self._lib.bpf_program__fd(self._lib.bpf_object__find_program_by_name(self._object, name.encode())))

    def map(self, name: str, key: str, value: str, *, per_cpu: bool = False) -> Map:
        """A map of the object, with the C types of its keys and values."""
        found = self._lib.bpf_object__find_map_by_name(self._object, name.encode())
        sizes = (self._lib.bpf_map__key_size(found), self._lib.bpf_map__value_size(found))
        if sizes != (ffi.sizeof(key), ffi.sizeof(value)):
            raise CheckmateError(f"switch.bpf.o is of another version (map {name}); run `make` again")
        cpus = self._lib.libbpf_num_possible_cpus() if per_cpu else 1
        return Map(self._lib.bpf_map__fd(found), self._lib.bpf_map__max_entries(found), key, value, cpus)

    def close(self) -> None:
        """Release programs and maps that nothing else holds."""
        if self._object != ffi.NULL:
            self._lib.bpf_object__close(self._object)
            self._object = ffi.NULL


def _advice(error: int) -> str:
    if error in (errno.EPERM, errno.EACCES):
        return "loading needs CAP_BPF and CAP_NET_ADMIN; run as root"
    if error in (errno.ENOSYS, errno.EOPNOTSUPP):
        return "the kernel lacks BPF; it needs CONFIG_BPF_SYSCALL=y"
    return "the verifier's report is on standard error; Linux 5.15 or later is needed"


class Filter:
    """A program on one direction of an interface's clsact qdisc; takes the place of one a dead owner left."""

    def __init__(self, ifindex: int, direction: int, program: int, handle: int, priority: int) -> None:
        self._hook = ffi.new("struct bpf_tc_hook *")
        self._hook.sz, self._hook.ifindex, self._hook.attach_point = (
            ffi.sizeof("struct bpf_tc_hook"),
            ifindex,
            direction,
        )
        self._handle, self._priority = handle, priority
        opts = self._options()
        opts.prog_fd, opts.flags = program, _REPLACE
        _check_tc(_library().bpf_tc_attach(self._hook, opts), "attach")

    def _options(self) -> Any:
        opts = ffi.new("struct bpf_tc_opts *")
        opts.sz, opts.handle, opts.priority = ffi.sizeof("struct bpf_tc_opts"), self._handle, self._priority
        return opts

    def detach(self) -> None:
        """Remove the filter; one that is already gone, with its interface perhaps, is no error."""
        result = _library().bpf_tc_detach(self._hook, self._options())
        if -result not in (errno.ENOENT, errno.EINVAL, errno.ENODEV):
            _check_tc(result, "detach")


def add_clsact(ifindex: int) -> bool:
    """Give an interface a clsact qdisc; False when it has one already."""
    library = _library()
    report = library.libbpf_set_print(ffi.NULL)  # an existing qdisc is no news
    result = library.bpf_tc_hook_create(_clsact(ifindex))
    library.libbpf_set_print(report)
    if result == -errno.EEXIST:
        return False
    _check_tc(result, "create clsact")
    return True


def remove_clsact(ifindex: int) -> None:
    """Remove the clsact qdisc with all its filters; one that is already gone is no error."""
    _library().bpf_tc_hook_destroy(_clsact(ifindex))


def _clsact(ifindex: int) -> Any:
    hook = ffi.new("struct bpf_tc_hook *")
    hook.sz, hook.ifindex, hook.attach_point = ffi.sizeof("struct bpf_tc_hook"), ifindex, INGRESS | EGRESS
    return hook


def _check_tc(result: int, what: str) -> None:
    if -result in (errno.EPERM, errno.EACCES):
        raise CheckmateError(f"tc {what}: not permitted; attaching needs CAP_NET_ADMIN, run as root")
    if result == -errno.ENOENT:
        raise CheckmateError(
            f"tc {what}: the kernel needs CONFIG_NET_SCH_INGRESS, CONFIG_NET_CLS_BPF, CONFIG_NET_CLS_ACT"
        )
    _check(result, f"tc {what}")
