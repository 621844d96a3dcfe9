/* A disk that fails, for a process that is started with LD_PRELOAD.

   FAILS_AT    what fails: open (for writing), write, close, fsync or rename; or "lost": what is written gets
               lost without a word, and only close reports it, as of network filesystems and quotas.
   FAILS_FOR   parts of the paths for which it does, with colons between them; of a rename, of the new path.
   FAILS_WITH  the number of the error.

   The environment is read at each call, so a process may change what fails. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int asked(const char *operation) {
    const char *at = getenv("FAILS_AT");
    return at && !strcmp(at, operation);
}

static int fails(const char *path) {
    char parts[4096], *left = parts, *part;
    snprintf(parts, sizeof parts, "%s", getenv("FAILS_FOR"));
    while ((part = strsep(&left, ":"))) {
        if (!strstr(path, part)) continue;
        errno = atoi(getenv("FAILS_WITH"));
        return 1;
    }
    return 0;
}

/* Whether an operation with an open file fails: one that was opened for writing, or a folder. */
static int fails_with(int file) {
    char link[32], path[4096];
    int flags = fcntl(file, F_GETFL);
    if (flags < 0 || ((flags & O_ACCMODE) == O_RDONLY && !asked("fsync"))) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return fails(path);
}

static int open_at(int folder, const char *path, int flags, mode_t mode) {
    if (asked("open") && (flags & O_ACCMODE) != O_RDONLY && fails(path)) return -1;
    return syscall(SYS_openat, folder, path, flags, mode);
}

#define MODE(flags)                                        \
    mode_t mode = 0;                                       \
    if ((flags) & (O_CREAT | O_TMPFILE)) {                 \
        va_list rest;                                      \
        va_start(rest, flags);                             \
        mode = va_arg(rest, mode_t);                       \
        va_end(rest);                                      \
    }

int open(const char *path, int flags, ...) {
    MODE(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}

int open64(const char *path, int flags, ...) {
    MODE(flags)
    return open_at(AT_FDCWD, path, flags, mode);
}

int openat(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return open_at(folder, path, flags, mode);
}

int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags)
    return open_at(folder, path, flags, mode);
}

ssize_t write(int file, const void *content, size_t size) {
    if (asked("write") && fails_with(file)) return -1;
    if (asked("lost") && fails_with(file)) return size;
    return syscall(SYS_write, file, content, size);
}

ssize_t writev(int file, const struct iovec *parts, int count) {
    if (asked("write") && fails_with(file)) return -1;
    if (asked("lost") && fails_with(file)) {
        ssize_t size = 0;
        for (int each = 0; each < count; each++) size += parts[each].iov_len;
        return size;
    }
    return syscall(SYS_writev, file, parts, count);
}

ssize_t pwrite64(int file, const void *content, size_t size, off64_t at) {
    if (asked("write") && fails_with(file)) return -1;
    if (asked("lost") && fails_with(file)) return size;
    return syscall(SYS_pwrite64, file, content, size, at);
}

static int fails_to_close(int file) {
    return (asked("lost") || asked("close")) && fails_with(file);
}

int close(int file) {
    int is_lost = fails_to_close(file), error = errno;
    int result = syscall(SYS_close, file);
    if (!is_lost) return result;
    errno = error;
    return -1;
}

int fclose(FILE *file) { /* which C++ closes its files with */
    int (*close_it)(FILE *) = (int (*)(FILE *))dlsym(RTLD_NEXT, "fclose");
    int is_lost = fails_to_close(fileno(file)), error = errno;
    int result = close_it(file);
    if (!is_lost) return result;
    errno = error;
    return EOF;
}

int fsync(int file) {
    return asked("fsync") && fails_with(file) ? -1 : syscall(SYS_fsync, file);
}

int rename(const char *path, const char *other) {
    if (asked("rename") && fails(other)) return -1;
    return syscall(SYS_renameat, AT_FDCWD, path, AT_FDCWD, other);
}
