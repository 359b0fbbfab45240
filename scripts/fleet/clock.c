// Shifts the wall clock of a program by the seconds in a file, which may change while it runs.
//
//   cc -shared -fPIC -O2 -o clock.so clock.c
//   LD_PRELOAD=./clock.so SHIFTED_CLOCK=FILE redis-server
//
// The file contains one 64-bit integer in this machine's byte order. libfaketime is not used,
// because it reads its offset from a text file with functions that allocate memory. Redis'
// allocator reads the clock, so this would cause an endless recursion.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

__attribute__((constructor)) static void map_shift(void) {
    const char *path = getenv("SHIFTED_CLOCK");
    int file = path ? open(path, O_RDONLY) : -1;
    if (file < 0) _exit(97);
    void *mapped = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    if (mapped == MAP_FAILED) _exit(98);
    shift = mapped;
    close(file);
}

static int64_t shift_of(clockid_t clock) {
    int is_wall = clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE;
    return shift && is_wall ? *shift : 0;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int result = (int)syscall(SYS_clock_gettime, clock, now);
    if (result == 0) now->tv_sec += shift_of(clock);
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec precise;
    if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return -1;
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *where) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (where) *where = now.tv_sec;
    return now.tv_sec;
}
