/* A disk that fails: counts the calls that change files under one folder, and lets one of them go wrong.

   It is preloaded (LD_PRELOAD), and told through the functions at the end what to watch and what to do. Each call is
   made with syscall(), so nothing of libc is needed beneath the functions that are replaced. One thread only. */

#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT, KILL_BEFORE, KILL_AFTER, FAIL, FAIL_FROM, SHORT_WRITE, LOSE_DATA, LOSE_ALL };
enum { MAX_FDS = 65536, MAX_CALLS = 65536, MAX_PENDING = 1024 };

static char prefix[PATH_MAX];
static char is_watched_fd[MAX_FDS];
static const char *calls[MAX_CALLS];
static long number_of_calls, fault_at;
static int action, fault_errno;

/* What is not on the disk yet: written data, and names that a folder has got. */
struct pending {
    dev_t device;
    ino_t inode;
    int fd;         /* the written file, or the folder of the new name */
    char name[NAME_MAX + 1];
    int old_fd;     /* where a renamed file was, else -1 */
    char old_name[NAME_MAX + 1];
};
static struct pending data[MAX_PENDING], names[MAX_PENDING];
static int data_size, names_size;

static int is_watched(int folder, const char *path) {
    size_t length = strlen(prefix);
    if (path[0] != '/') return folder >= 0 && folder < MAX_FDS && is_watched_fd[folder];
    return length && !strncmp(path, prefix, length) && (path[length] == '/' || !path[length]);
}

static int is_watched_file(int fd) { return fd >= 0 && fd < MAX_FDS && is_watched_fd[fd]; }

static void identify(struct pending *entry) {
    struct stat status;
    fstat(entry->fd, &status);
    entry->device = status.st_dev;
    entry->inode = status.st_ino;
}

/* Opens the folder that a path's last part is in, and copies that part. */
static int open_folder(int folder, const char *path, char *name) {
    char parent[PATH_MAX] = ".";
    const char *slash = strrchr(path, '/');
    snprintf(name, NAME_MAX + 1, "%s", slash ? slash + 1 : path);
    if (slash) snprintf(parent, sizeof parent, "%.*s", (int)(slash - path), path);
    return syscall(SYS_openat, folder, parent, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static void note_data(int fd) {
    if (action < LOSE_DATA || data_size == MAX_PENDING) return;
    struct pending *entry = &data[data_size++];
    entry->fd = syscall(SYS_dup, fd);
    identify(entry);
}

static void note_name(int folder, const char *path, int old_folder, const char *old_path) {
    if (action < LOSE_DATA || names_size == MAX_PENDING) return;
    struct pending *entry = &names[names_size++];
    entry->fd = open_folder(folder, path, entry->name);
    entry->old_fd = old_path ? open_folder(old_folder, old_path, entry->old_name) : -1;
    identify(entry);
}

/* What one file or folder had pending is on the disk now. */
static int settle(struct pending *list, int size, int fd) {
    struct pending synced = {.fd = fd};
    int left = 0;
    identify(&synced);
    for (int i = 0; i < size; i++)
        if (list[i].device != synced.device || list[i].inode != synced.inode) list[left++] = list[i];
    return left;
}

static void note_sync(int fd) {
    data_size = settle(data, data_size, fd);
    names_size = settle(names, names_size, fd);
}

static void lose_data(void) {
    struct stat status;
    for (int i = 0; i < data_size; i++)
        if (!fstat(data[i].fd, &status)) syscall(SYS_ftruncate, data[i].fd, status.st_size / 2);
}

static void lose_names(void) {
    while (names_size--) {
        struct pending *entry = &names[names_size];
        if (entry->old_fd >= 0)
            syscall(SYS_renameat2, entry->fd, entry->name, entry->old_fd, entry->old_name, 0);
        else
            syscall(SYS_unlinkat, entry->fd, entry->name, 0);
    }
}

static void die(void) {
    if (action >= LOSE_DATA) lose_data();
    if (action == LOSE_ALL) lose_names();
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

/* Returns the number of the call, or -1 if it has to fail. */
static long begin(const char *call, int takes_room) {
    long number = ++number_of_calls;
    if (number < MAX_CALLS) calls[number] = call;
    int is_here = number == fault_at;
    if (is_here && (action == KILL_BEFORE || action >= LOSE_DATA)) die();
    /* A disk that is full still removes; one that is broken does nothing any more. */
    int is_after = fault_at && number >= fault_at && (fault_errno != ENOSPC || takes_room);
    if (!(action == FAIL && is_here) && !(action == FAIL_FROM && is_after)) return number;
    errno = fault_errno;
    return -1;
}

static void end(long number) {
    if (number == fault_at && action == KILL_AFTER) die();
}

#define FAULTY(watched, call, takes_room, perform, noted) \
    ({ \
        long number = (watched) ? begin(call, takes_room) : 0, result = -1; \
        if (number >= 0) result = (perform); \
        if (number > 0 && result >= 0) { noted; } \
        if (number > 0) end(number); \
        result; \
    })

static int open_file(int folder, const char *path, int flags, mode_t mode) {
    int watched = is_watched(folder, path);
    int fd = FAULTY(watched, flags & O_CREAT ? "create" : "open", flags & O_CREAT,
                    syscall(SYS_openat, folder, path, flags, mode), if (flags & O_CREAT) note_name(folder, path, -1, 0));
    if (fd >= 0 && fd < MAX_FDS) is_watched_fd[fd] = watched;
    return fd;
}

#define OPEN(signature, folder) \
    int signature { \
        va_list arguments; \
        va_start(arguments, flags); \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(arguments, mode_t) : 0; \
        va_end(arguments); \
        return open_file(folder, path, flags, mode); \
    }
OPEN(open(const char *path, int flags, ...), AT_FDCWD)
OPEN(open64(const char *path, int flags, ...), AT_FDCWD)
OPEN(openat(int folder, const char *path, int flags, ...), folder)
OPEN(openat64(int folder, const char *path, int flags, ...), folder)
int creat(const char *path, mode_t mode) { return open_file(AT_FDCWD, path, O_CREAT | O_WRONLY | O_TRUNC, mode); }
int creat64(const char *path, mode_t mode) { return creat(path, mode); }

/* A short write takes half of the bytes. */
static size_t granted(int fd, size_t size) {
    int is_here = is_watched_file(fd) && number_of_calls + 1 == fault_at;
    return is_here && action == SHORT_WRITE ? size / 2 : size;
}

ssize_t write(int fd, const void *bytes, size_t size) {
    size = granted(fd, size);
    return FAULTY(is_watched_file(fd), "write", 1, syscall(SYS_write, fd, bytes, size), note_data(fd));
}
ssize_t pwrite(int fd, const void *bytes, size_t size, off_t offset) {
    size = granted(fd, size);
    return FAULTY(is_watched_file(fd), "pwrite", 1, syscall(SYS_pwrite64, fd, bytes, size, offset), note_data(fd));
}
ssize_t pwrite64(int fd, const void *bytes, size_t size, off64_t offset) { return pwrite(fd, bytes, size, offset); }
ssize_t writev(int fd, const struct iovec *parts, int count) {
    return FAULTY(is_watched_file(fd), "writev", 1, syscall(SYS_writev, fd, parts, count), note_data(fd));
}
int ftruncate(int fd, off_t size) {
    return FAULTY(is_watched_file(fd), "ftruncate", 1, syscall(SYS_ftruncate, fd, size), note_data(fd));
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }

int fsync(int fd) { return FAULTY(is_watched_file(fd), "fsync", 1, syscall(SYS_fsync, fd), note_sync(fd)); }
int fdatasync(int fd) { return FAULTY(is_watched_file(fd), "fdatasync", 1, syscall(SYS_fdatasync, fd), note_sync(fd)); }

int close(int fd) {
    int watched = is_watched_file(fd);
    if (watched) is_watched_fd[fd] = 0;
    long number = watched ? begin("close", 0) : 0;
    int told = errno, result = syscall(SYS_close, fd); /* Linux closes the descriptor of a close that fails, too */
    if (number > 0) end(number);
    if (number >= 0) return result;
    errno = told;
    return -1;
}

int renameat2(int old_folder, const char *old_path, int folder, const char *path, unsigned flags) {
    return FAULTY(is_watched(old_folder, old_path) || is_watched(folder, path), "rename", 1,
                  syscall(SYS_renameat2, old_folder, old_path, folder, path, flags),
                  note_name(folder, path, old_folder, old_path));
}
int renameat(int old_folder, const char *old_path, int folder, const char *path) {
    return renameat2(old_folder, old_path, folder, path, 0);
}
int rename(const char *old_path, const char *path) { return renameat2(AT_FDCWD, old_path, AT_FDCWD, path, 0); }

int mkdirat(int folder, const char *path, mode_t mode) {
    return FAULTY(is_watched(folder, path), "mkdir", 1, syscall(SYS_mkdirat, folder, path, mode), );
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int unlinkat(int folder, const char *path, int flags) {
    return FAULTY(is_watched(folder, path), flags & AT_REMOVEDIR ? "rmdir" : "unlink", 0,
                  syscall(SYS_unlinkat, folder, path, flags), );
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

/* Watches a folder from now on. At call number `at` (from 1), `act` happens; `error` is what a failed call says. */
void faulty_disk_watch(const char *folder, int act, long at, int error) {
    snprintf(prefix, sizeof prefix, "%s", folder);
    memset(is_watched_fd, 0, sizeof is_watched_fd);
    number_of_calls = 0;
    action = act, fault_at = at, fault_errno = error;
}

long faulty_disk_calls(void) { return number_of_calls; }
const char *faulty_disk_call(long number) { return calls[number]; }
