"""Memory maps whose file may become shorter: what is read behind its end is zero, and known to be lost.

The system answers such a read with SIGBUS, which would end the process. The handler here puts empty memory in the place
of the lost pages, so that the read continues, and marks the map; reads of other memory are left to the handler before it.
Wayland guards the memory that its clients share in the same way (wl_shm_buffer_begin_access).
"""

cdef extern from *:
    """
    #include <stddef.h>
    #define FTK_MOST_MAPS 4096

    static struct { size_t start, length; int lost; } ftk_maps[FTK_MOST_MAPS];

    #ifdef _WIN32
    static void ftk_install(void) {}  /* there, a mapped file cannot become shorter */
    #else
    #include <signal.h>
    #include <sys/mman.h>
    #include <unistd.h>
    #ifndef MAP_ANONYMOUS
    #define MAP_ANONYMOUS MAP_ANON
    #endif

    static struct sigaction ftk_before;
    static size_t ftk_page;

    static void ftk_on_bus_error(int number, siginfo_t* info, void* context) {
        size_t at = (size_t) info->si_addr, page = at - at % ftk_page;
        int i;
        (void) context;
        for (i = 0; i < FTK_MOST_MAPS && info->si_code > 0; i++) {
            if (at - ftk_maps[i].start < ftk_maps[i].length) {
                ftk_maps[i].lost = 1;
                if (mmap((void*) page, ftk_maps[i].start + ftk_maps[i].length - page, PROT_READ,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED) {
                    return;
                }
            }
        }
        sigaction(number, &ftk_before, NULL);  /* the read is repeated, and ends there */
        if (info->si_code <= 0) {
            raise(number);
        }
    }

    static void ftk_install(void) {
        struct sigaction now, ours;
        if (sigaction(SIGBUS, NULL, &now) != 0
                || ((now.sa_flags & SA_SIGINFO) && now.sa_sigaction == ftk_on_bus_error)) {
            return;
        }
        ftk_before = now;
        ftk_page = (size_t) sysconf(_SC_PAGESIZE);
        ours.sa_sigaction = ftk_on_bus_error;
        ours.sa_flags = SA_SIGINFO | SA_ONSTACK;
        sigemptyset(&ours.sa_mask);
        sigaction(SIGBUS, &ours, NULL);
    }
    #endif
    """
    cdef enum:
        FTK_MOST_MAPS
    struct Map:
        size_t start
        size_t length
        bint lost
    Map ftk_maps[FTK_MOST_MAPS]
    void ftk_install()


def guard(const unsigned char[::1] mapped not None):
    """Guards a map; returns its number, or -1 where there are too many to guard this one."""
    cdef int i
    ftk_install()
    for i in range(FTK_MOST_MAPS):
        if ftk_maps[i].length == 0 and mapped.shape[0] > 0:
            ftk_maps[i].start = <size_t> &mapped[0]
            ftk_maps[i].lost = False
            ftk_maps[i].length = mapped.shape[0]
            return i
    return -1


def release(int number):
    """Ends the guard of a map that is no longer there."""
    if 0 <= number < FTK_MOST_MAPS:
        ftk_maps[number].length = 0


def is_lost(int number):
    """Whether something was read that the file no longer holds."""
    return 0 <= number < FTK_MOST_MAPS and bool(ftk_maps[number].lost)


def install():
    """Puts the handler in its place again, where another library has taken that."""
    ftk_install()
