"""A disk that is full or slow for one job only: a small library that the loader puts before the C library's writes.

Files below FAULTY_FOLDER meet the fault while a file of its name exists in FAULTY_CONTROL:

    full    a write fails with ENOSPC, as on a full disk
    slow    a write takes as long as at the bytes per second in FAULTY_RATE

With FAULTY_BOUNDARY=N a process and its parent are killed at its Nth boundary of a file: before the first write to
another file, and before and after a file or folder is renamed. It acts on `write` and its relatives, whoever calls
them: Python, torch's C++ writers, safetensors.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from mst_scale.errors import UserError

SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static int set(const char *fault) {
    char path[4096];
    const char *control = getenv("FAULTY_CONTROL");
    if (!control) return 0;
    snprintf(path, sizeof path, "%s/%s", control, fault);
    return access(path, F_OK) == 0;
}

static int inside(const char *path) {
    const char *folder = getenv("FAULTY_FOLDER");
    return folder && strncmp(path, folder, strlen(folder)) == 0;
}

static void boundary(void) {
    static int passed = 0;
    const char *last = getenv("FAULTY_BOUNDARY");
    if (last && ++passed == atoi(last)) {
        kill(getppid(), SIGKILL);
        kill(getpid(), SIGKILL);
    }
}

/* 1 if the write is to fail */
static int meets(int fd, size_t bytes) {
    static char before[4096];
    int kept = errno, full = set("full"), slow = set("slow");
    char link[64], path[4096];
    const char *rate = getenv("FAULTY_RATE");
    errno = kept;
    if (!full && !slow && !getenv("FAULTY_BOUNDARY")) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    errno = kept;
    if (length < 0) return 0;
    path[length] = 0;
    if (!inside(path)) return 0;
    if (strcmp(path, before)) boundary();
    strcpy(before, path);
    if (full) { errno = ENOSPC; return 1; }
    if (!slow) return 0;
    double seconds = bytes / atof(rate);
    struct timespec wait = {(time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9)};
    nanosleep(&wait, NULL);
    errno = kept;
    return 0;
}

#define REAL(name) __typeof__(&name) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

ssize_t write(int fd, const void *data, size_t n) {
    REAL(write);
    return meets(fd, n) ? -1 : real(fd, data, n);
}
ssize_t pwrite(int fd, const void *data, size_t n, off_t at) {
    REAL(pwrite);
    return meets(fd, n) ? -1 : real(fd, data, n, at);
}
ssize_t pwrite64(int fd, const void *data, size_t n, off64_t at) {
    REAL(pwrite64);
    return meets(fd, n) ? -1 : real(fd, data, n, at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    REAL(writev);
    size_t n = 0;
    for (int i = 0; i < count; i++) n += parts[i].iov_len;
    return meets(fd, n) ? -1 : real(fd, parts, count);
}
int rename(const char *from, const char *to) {
    REAL(rename);
    if (inside(to)) boundary();
    int failed = real(from, to);
    if (inside(to)) boundary();
    return failed;
}
"""


def environment(folder: Path, control: Path, rate: float) -> dict[str, str]:
    """Build the library in `control`; return what a job needs in its environment to meet the faults below `folder`.

    Raises:
        UserError: if there is no C compiler.
    """
    source, library = control / "faulty_disk.c", control / "faulty_disk.so"
    source.write_text(SOURCE)
    try:
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise UserError(f"a C compiler (cc) is needed for disks that are full or slow: {error}") from None
    return {
        "LD_PRELOAD": os.pathsep.join(filter(None, [str(library), os.environ.get("LD_PRELOAD")])),
        "FAULTY_FOLDER": str(folder.resolve()),
        "FAULTY_CONTROL": str(control.resolve()),
        "FAULTY_RATE": str(rate),
    }
