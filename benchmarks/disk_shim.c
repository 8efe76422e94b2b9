/* Preloaded under a process, it logs what the process does to the files below $SHIM_FOLDER, and can pretend that the disk is full.

   Log ($SHIM_LOG), one record after the other: op, path length, offset, data length (native integers), path, data. Ops:
   W write, T truncate (offset is the new size), S fsync or fdatasync, U unlink, C created.
   shim_fail_from(n): the n-th write, and each after it, fails with ENOSPC until shim_fail_from(0). shim_writes(): writes so far. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char *paths[4096];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static long writes, fail_from;
static int log_fd = -1;

long shim_writes(void) { return writes; }
void shim_fail_from(long n) { fail_from = n; writes = 0; }

static int watched(const char *path) {
    const char *folder = getenv("SHIM_FOLDER");
    return folder && path && !strncmp(path, folder, strlen(folder));
}

static ssize_t plain_write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = dlsym(RTLD_NEXT, "write");
    return real(fd, data, size);
}

static void note(char op, const char *path, uint64_t offset, const void *data, uint64_t size) {
    const char *file = getenv("SHIM_LOG");
    if (!file || !path) return;
    pthread_mutex_lock(&lock);
    static int (*real_open)(const char *, int, ...);
    if (!real_open) real_open = dlsym(RTLD_NEXT, "open");
    if (log_fd < 0) log_fd = real_open(file, O_WRONLY | O_CREAT | O_APPEND, 0644);
    struct { uint64_t op, path, offset, size; } head = {op, strlen(path), offset, size};
    plain_write(log_fd, &head, sizeof head);
    plain_write(log_fd, path, head.path);
    if (size) plain_write(log_fd, data, size);
    pthread_mutex_unlock(&lock);
}

static const char *path_of(int fd) { return fd >= 0 && fd < 4096 ? paths[fd] : NULL; }

static int full(const char *path) {
    if (!path) return 0;
    writes++;
    if (!fail_from || writes < fail_from) return 0;
    errno = ENOSPC;
    return 1;
}

static int opened(int fd, const char *path, int existed) {
    if (fd >= 0 && fd < 4096 && watched(path)) {
        paths[fd] = strdup(path);
        if (!existed) note('C', path, 0, NULL, 0);
    }
    return fd;
}

#define OPEN(name)                                                          \
    int name(const char *path, int flags, ...) {                            \
        static int (*real)(const char *, int, ...);                         \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        va_list list;                                                       \
        va_start(list, flags);                                              \
        mode_t mode = va_arg(list, mode_t);                                 \
        va_end(list);                                                       \
        int existed = !watched(path) || access(path, F_OK) == 0;            \
        return opened(real(path, flags, mode), path, existed);              \
    }
OPEN(open)
OPEN(open64)

int close(int fd) {
    static int (*real)(int);
    if (!real) real = dlsym(RTLD_NEXT, "close");
    if (path_of(fd)) { free(paths[fd]); paths[fd] = NULL; }
    return real(fd);
}

#define PWRITE(name, offset_type)                                           \
    ssize_t name(int fd, const void *data, size_t size, offset_type at) {   \
        static ssize_t (*real)(int, const void *, size_t, offset_type);     \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        if (full(path_of(fd))) return -1;                                   \
        ssize_t done = real(fd, data, size, at);                            \
        if (done > 0) note('W', path_of(fd), at, data, done);               \
        return done;                                                        \
    }
PWRITE(pwrite, off_t)
PWRITE(pwrite64, off64_t)

ssize_t write(int fd, const void *data, size_t size) {
    if (!path_of(fd)) return plain_write(fd, data, size);
    if (full(path_of(fd))) return -1;
    off_t at = lseek(fd, 0, SEEK_CUR);
    if (fcntl(fd, F_GETFL) & O_APPEND) at = lseek(fd, 0, SEEK_END);
    ssize_t done = plain_write(fd, data, size);
    if (done > 0) note('W', path_of(fd), at, data, done);
    return done;
}

#define TRUNCATE(name, size_type)                                           \
    int name(int fd, size_type size) {                                      \
        static int (*real)(int, size_type);                                 \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        struct stat now;                                                    \
        if (path_of(fd) && !fstat(fd, &now) && size > now.st_size && full(path_of(fd))) return -1; \
        int result = real(fd, size);                                        \
        if (!result) note('T', path_of(fd), size, NULL, 0);                 \
        return result;                                                      \
    }
TRUNCATE(ftruncate, off_t)
TRUNCATE(ftruncate64, off64_t)

#define SYNC(name)                                                          \
    int name(int fd) {                                                      \
        static int (*real)(int);                                            \
        if (!real) real = dlsym(RTLD_NEXT, #name);                          \
        int result = real(fd);                                              \
        if (!result) note('S', path_of(fd), 0, NULL, 0);                    \
        return result;                                                      \
    }
SYNC(fsync)
SYNC(fdatasync)

int unlink(const char *path) {
    static int (*real)(const char *);
    if (!real) real = dlsym(RTLD_NEXT, "unlink");
    int result = real(path);
    if (!result && watched(path)) note('U', path, 0, NULL, 0);
    return result;
}
