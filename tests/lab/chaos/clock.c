/* Shift the wall clock of one process, and let others set by how much while it runs.
 *
 * libfaketime does this and much more, and hangs a redis-server that is built with jemalloc, because looking up the
 * real function allocates memory. The kernel is asked instead.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile long long *shift; /* microseconds, in a file that is mapped */

__attribute__((constructor)) static void begin(void) {
    const char *path = getenv("REDLOCK_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) return;
    void *page = mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
    if (page != MAP_FAILED) shift = page;
    close(file);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = syscall(SYS_clock_gettime, clock, now);
    if (!failed && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        long long nanoseconds = now->tv_nsec + *shift % 1000000 * 1000;
        now->tv_sec += *shift / 1000000 + (nanoseconds < 0 ? -1 : nanoseconds / 1000000000);
        now->tv_nsec = (nanoseconds + 1000000000) % 1000000000;
    }
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *also) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (also) *also = exact.tv_sec;
    return exact.tv_sec;
}
