/* What hop.py measures: frames through a switch, many at a time or one by one. */
#define _GNU_SOURCE
#include <poll.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>

#define BURST     32
#define SILENT_MS 2000
#define HEADER    14 /* enough to see what a frame is */
#define RECEIVERS 2

static uint64_t nanoseconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int send_some(int fd, const void *frame, uint32_t bytes, uint32_t count)
{
    struct iovec part = {.iov_base = (void *)frame, .iov_len = bytes};
    struct mmsghdr messages[BURST] = {0};
    for (int i = 0; i < BURST; i++)
        messages[i].msg_hdr = (struct msghdr){.msg_iov = &part, .msg_iovlen = 1};
    return sendmmsg(fd, messages, count < BURST ? count : BURST, 0);
}

/* Frames of this size that have arrived: ours, since nothing else on these links has it. */
static uint32_t receive_some(int fd, uint32_t bytes)
{
    uint8_t heads[BURST][HEADER];
    struct iovec parts[BURST];
    struct mmsghdr messages[BURST] = {0};
    for (int i = 0; i < BURST; i++) {
        parts[i] = (struct iovec){.iov_base = heads[i], .iov_len = HEADER};
        messages[i].msg_hdr = (struct msghdr){.msg_iov = &parts[i], .msg_iovlen = 1};
    }
    uint32_t ours = 0;
    int got = recvmmsg(fd, messages, BURST, MSG_DONTWAIT | MSG_TRUNC, NULL);
    for (int i = 0; i < got; i++)
        ours += messages[i].msg_len == bytes;
    return ours;
}

static int wait_for(const int *fds, uint32_t receivers)
{
    struct pollfd polled[RECEIVERS];
    for (uint32_t i = 0; i < receivers; i++)
        polled[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
    return poll(polled, receivers, SILENT_MS) > 0 ? 0 : -1;
}

/* Sends `count` frames, at most `window` of them on their way to the slowest of the receivers. Returns the seconds
 * until all have arrived at all receivers (two at most), -1 when one is silent: frames were lost. */
double hop_stream(int from, const int *to, uint32_t receivers, const void *frame, uint32_t bytes, uint32_t count,
                  uint32_t window)
{
    uint32_t sent = 0, arrived[RECEIVERS] = {0}, slowest = 0;
    uint64_t begin = nanoseconds();
    while (slowest < count) {
        uint32_t room = window - (sent - slowest), left = count - sent, before = sent + slowest;
        if (room && left) {
            int done = send_some(from, frame, bytes, room < left ? room : left);
            sent += done > 0 ? (uint32_t)done : 0;
        }
        slowest = count;
        for (uint32_t i = 0; i < receivers; i++) {
            arrived[i] += receive_some(to[i], bytes);
            slowest = arrived[i] < slowest ? arrived[i] : slowest;
        }
        if (sent + slowest == before && wait_for(to, receivers))
            return -1;
    }
    return (double)(nanoseconds() - begin) * 1e-9;
}

/* Sends frames one by one; the time of each until it has arrived at the first receiver goes to `ns`. The next one
 * waits for all receivers. Returns 0, or -1 when a frame was lost. */
int hop_single(int from, const int *to, uint32_t receivers, const void *frame, uint32_t bytes, uint32_t count,
               uint64_t *ns)
{
    for (uint32_t i = 0; i < count; i++) {
        uint64_t begin = nanoseconds();
        if (send_some(from, frame, bytes, 1) != 1)
            return -1;
        for (uint32_t receiver = 0; receiver < receivers; receiver++) {
            while (!receive_some(to[receiver], bytes))
                if (wait_for(to + receiver, 1))
                    return -1;
            if (receiver == 0)
                ns[i] = nanoseconds() - begin;
        }
    }
    return 0;
}
